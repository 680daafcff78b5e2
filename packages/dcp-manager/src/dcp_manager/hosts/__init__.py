"""Checkpoints whose parts lie on several hosts: repetition of indexes, copies on other hosts, and what is where."""
