"""Copying a checkpoint, or one host's part of it, to another tier, every byte checked on its way."""
