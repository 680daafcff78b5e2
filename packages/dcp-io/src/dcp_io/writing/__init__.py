"""Parallel writing of one rank's items to data files."""
