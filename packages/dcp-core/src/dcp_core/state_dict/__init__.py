"""State dicts and the names of their values: nested to flat, renamed, per rank."""
