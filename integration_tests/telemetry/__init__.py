"""Spans and metrics of real saves and loads: on several ranks, in the background, in a process that is killed."""
