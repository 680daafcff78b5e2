"""Which rank writes and reads what, agreed by all."""
