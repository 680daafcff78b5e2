"""The queue of saves: one after the other, in the same order on every rank, with overlap policies."""
