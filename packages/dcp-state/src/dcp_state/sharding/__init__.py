"""Whole tensors to shards and back, across ranks."""
