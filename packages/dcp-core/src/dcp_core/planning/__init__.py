"""Planning of saves and loads: local and global plans, which decide which rank writes and reads which items."""
