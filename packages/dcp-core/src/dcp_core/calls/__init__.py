"""Calling conventions: stock's positional arguments, exclusion from `torch.compile`, child Python interpreters."""
