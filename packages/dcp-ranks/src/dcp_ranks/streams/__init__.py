"""Streams of bytes between the ranks of one operation, and descriptors within a host."""
