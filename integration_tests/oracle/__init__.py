"""Every kind of value, saved and loaded by PyTorch's checkpointing and by ours, both ways."""
