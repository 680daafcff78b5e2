"""The pickle that PyTorch's checkpointing reads and writes."""
