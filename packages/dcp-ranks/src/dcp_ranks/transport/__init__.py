"""Bytes between ranks, through a `torch.distributed` store and over TCP."""
