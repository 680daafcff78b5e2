"""Checkpoints at rest: list, newest, verify, remove."""
