"""State dicts: flattening nested dicts and lists into FQNs, renaming keys, and per-rank objects."""
