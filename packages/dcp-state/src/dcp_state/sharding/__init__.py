"""Sharding: whole tensors to shards and back, across ranks."""
