"""Saving and loading as calls of all ranks: their order, failures, groups, threads, modes of torch, and events."""
