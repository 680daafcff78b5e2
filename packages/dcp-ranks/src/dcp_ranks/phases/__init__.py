"""Phases of an operation: each rank runs a function, ranks exchange outcomes, the coordinator decides the result."""
