"""Checkpoints in the memory of hosts: whatever is killed, the next job resumes from the nearest place that has it."""
