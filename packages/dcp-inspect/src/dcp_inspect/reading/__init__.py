"""Reading of values as numpy arrays and Python values, without torch if the bytes allow it."""
