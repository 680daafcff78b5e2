"""Pickles: safe reading by tables of allowed calls, and writing opcode by opcode. No code in a pickle is run."""
