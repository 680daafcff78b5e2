"""Which index files in a folder are the checkpoint, and which checkpoint is the newest."""
