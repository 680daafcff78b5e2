"""Pickles: read by tables of allowed calls, and written opcode by opcode; nothing in them runs."""
