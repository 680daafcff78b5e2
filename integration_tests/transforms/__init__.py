"""Compression and other transforms of what is stored, for every kind of value."""
