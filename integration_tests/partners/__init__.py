"""Copies of each host's part of a checkpoint on the next host, with hosts as threads of one process."""
