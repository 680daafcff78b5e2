"""Reading of values: numbers as numpy arrays, objects as Python values; without torch where the bytes allow it."""
