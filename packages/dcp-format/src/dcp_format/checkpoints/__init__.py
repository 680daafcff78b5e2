"""Reading and writing checkpoint folders for conversions: verified values from stored chunks."""
