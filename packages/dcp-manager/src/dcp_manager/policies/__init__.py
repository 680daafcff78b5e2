"""Policies: when to save, which checkpoints to keep, and whether steps may go back."""
