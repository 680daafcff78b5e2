"""Where PyTorch's checkpointing is known to be wrong, and ours is right."""
