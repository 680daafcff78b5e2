"""How functions here are called: positional arguments of old calls, `torch.compile`, child interpreters."""
