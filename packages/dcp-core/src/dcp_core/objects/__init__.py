"""Values that are not tensors: to bytes and back, without running what the bytes say."""
