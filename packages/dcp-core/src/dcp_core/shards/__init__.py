"""Shards: the boxes of a tensor that this rank holds, and their local memory."""
