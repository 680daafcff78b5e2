"""Stock's index: the pickle that PyTorch's checkpointing reads and writes."""
