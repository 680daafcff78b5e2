"""Index of a checkpoint in memory: its columns, records of their rows, and consistency checks."""
