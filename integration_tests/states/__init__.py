"""State dicts of all kinds, there and back: random ones, every dtype and kind of view, many small tensors."""
