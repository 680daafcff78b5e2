"""Queue of asynchronous saves: one at a time, in the same order on every rank, with overlap policies."""
