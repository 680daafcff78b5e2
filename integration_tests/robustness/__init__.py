"""Damaged, truncated and hostile files; crashes at every system call; ranks that raise, die or stall."""
