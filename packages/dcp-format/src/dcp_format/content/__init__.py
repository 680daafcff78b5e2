"""Content that a conversion carries between formats, and atomic creation of output files."""
