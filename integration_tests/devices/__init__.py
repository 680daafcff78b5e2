"""Saves and loads of tensors on accelerators: races between streams, and traps of devices."""
