"""Objects (values that are not tensors) to bytes and back, without running code from the bytes."""
