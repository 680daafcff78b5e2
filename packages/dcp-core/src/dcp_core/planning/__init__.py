"""Local and global plans: which rank writes and reads which items."""
