"""Pickles read by tables of what they may call, and written opcode by opcode; nothing in them runs."""
