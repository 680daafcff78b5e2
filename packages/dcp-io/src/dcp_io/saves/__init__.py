"""Life of one save in a folder: marker, publish, cleanup."""
