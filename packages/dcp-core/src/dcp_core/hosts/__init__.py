"""Checkpoints whose files lie in folders of several hosts: who shares a folder, and which save all can load."""
