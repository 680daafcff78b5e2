"""Storages of checkpoints whose files lie in stores of several hosts: places of hosts, commit, choice of a save."""
