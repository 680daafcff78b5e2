"""Agreement of ranks that never hangs: a coordinator for a process group."""
