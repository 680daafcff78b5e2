"""Transport of bytes between ranks: through the keys of a `torch.distributed` store, and over TCP connections."""
