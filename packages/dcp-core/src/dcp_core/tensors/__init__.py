"""Tensors as bytes: copies, casts, and pieces of large ones; independent of plans."""
