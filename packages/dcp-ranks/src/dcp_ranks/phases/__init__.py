"""Phases: each rank runs a function, ranks exchange outcomes, the coordinator decides."""
