"""Folders with checkpoints: the index files that count in a folder, and the newest checkpoint of several."""
