"""Serialization of objects (values that are not tensors), and loading them without running code from the checkpoint."""
