"""Whether every other rank lives, and how it is reached."""
