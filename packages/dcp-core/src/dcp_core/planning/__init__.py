"""Plans of saves and loads: which rank writes and reads which items, agreed by all ranks."""
