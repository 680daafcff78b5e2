"""Writes of one rank's items into data files, in parallel."""
