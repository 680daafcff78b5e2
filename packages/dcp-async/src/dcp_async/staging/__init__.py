"""Staging: copying state dicts to reused host memory, so that training may change them during a save."""
