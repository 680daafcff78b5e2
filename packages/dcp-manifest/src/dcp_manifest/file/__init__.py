"""Files of an index: all of `.metadata` as bytes, `[head][manifest][footer]`, to and from an index."""
