"""Checkpoints of every format version and of several torch versions: what was written once must stay readable."""
