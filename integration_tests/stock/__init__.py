"""Code and checkpoints of PyTorch's own checkpointing, beside the tests in `oracle/`."""
