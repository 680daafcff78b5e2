"""Copies of each host's part of a checkpoint on the next host, over connections between the ranks (dcp-ranks)."""
