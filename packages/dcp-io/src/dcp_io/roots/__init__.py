"""Roots, folders above the checkpoints of a training run: catalogue of checkpoints, notes on them, policies to keep."""
