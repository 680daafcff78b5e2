"""Progress bars of long operations, and pictures of layouts and of shards' holders."""
