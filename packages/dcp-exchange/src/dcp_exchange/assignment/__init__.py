"""Assignment of bytes to the ranks that read them: pieces, the ranks that want them, and their owners."""
