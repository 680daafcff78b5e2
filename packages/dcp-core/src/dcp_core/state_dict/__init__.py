"""Names of values: nested to flat, renamed, per rank."""
