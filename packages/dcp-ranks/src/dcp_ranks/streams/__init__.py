"""Streams of bytes between the ranks of one operation: connections made on demand, and descriptors within a host."""
