"""Memory as a storage: recovery beside a memcpy and beside PyTorch, and what a save into memory costs a trainer."""
