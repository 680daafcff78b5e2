"""A state dict copied into one reused allocation."""
