"""Conversion of `torch.save` files, and stock's functions and readers for them."""
