"""Visuals: progress bars of long operations, and pictures of layouts and of who holds what."""
