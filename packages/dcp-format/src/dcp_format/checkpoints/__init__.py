"""Reading and writing of checkpoint folders for conversions: tensors are read, verified, from their stored chunks."""
