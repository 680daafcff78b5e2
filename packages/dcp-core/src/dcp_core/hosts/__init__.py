"""Checkpoints with files in the stores of several hosts: host directories, commit, and choice of a save."""
