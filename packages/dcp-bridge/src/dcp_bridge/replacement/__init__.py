"""Replace `torch.distributed.checkpoint` in a running process, for code that cannot be edited."""
