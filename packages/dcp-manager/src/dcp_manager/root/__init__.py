"""The checkpoints under one root: what is there, what is known of each, and where each lies."""
