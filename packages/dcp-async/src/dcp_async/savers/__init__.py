"""Backends of asynchronous savers: a thread, or a worker process."""
