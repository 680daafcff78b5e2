"""Checkpoint folders as content: values read from stored chunks, verified."""
