"""Staging: copies of state dicts in one reused allocation."""
