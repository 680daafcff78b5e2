"""How others call `torch.distributed.checkpoint`: the same calls, with one import changed."""
