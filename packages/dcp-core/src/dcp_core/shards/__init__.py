"""Shards: the boxes of a global tensor that this rank holds, and their local memory."""
