"""Shards of tensors on this rank: the boxes of a global tensor that the rank holds, and their local memory."""
