"""Folders with checkpoints: choice of the current index in a folder, and search for the newest checkpoint."""
