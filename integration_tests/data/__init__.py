"""The position in the training data on real ranks, saved and loaded like any other value."""
