"""Copies of hosts' parts of a checkpoint on the next host, over connections between the ranks (dcp-ranks)."""
