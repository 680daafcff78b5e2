"""Who carries a save out: a thread, or a worker process."""
