"""A checkpoint's index in memory: columns, their records, and whether they contradict each other."""
