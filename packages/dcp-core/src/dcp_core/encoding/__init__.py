"""Values to stored bytes and back: payloads, compression and other transforms."""
