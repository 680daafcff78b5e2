"""Replacement of `torch.distributed.checkpoint` by our modules in a running process, for code that cannot be edited."""
