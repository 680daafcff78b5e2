"""Which part of a value this rank holds."""
