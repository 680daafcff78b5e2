"""Backends of savers: in a thread, or in a worker process."""
