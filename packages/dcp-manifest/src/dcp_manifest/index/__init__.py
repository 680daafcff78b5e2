"""Index of a checkpoint in memory: its columns, their records, and checks of their consistency."""
