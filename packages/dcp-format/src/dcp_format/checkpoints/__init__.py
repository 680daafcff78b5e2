"""Reading and writing of checkpoint folders for conversions: tensors are read and verified chunk by chunk."""
