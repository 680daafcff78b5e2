"""Storage readers and writers over a byte engine: the items of a planner to requests for bytes, and back."""
