"""Compression and other transforms of stored bytes."""
