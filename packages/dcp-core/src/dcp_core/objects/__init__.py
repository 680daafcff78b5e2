"""Serialize objects (values that are not tensors), and load them without running code from the checkpoint."""
