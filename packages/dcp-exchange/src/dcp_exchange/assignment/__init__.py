"""Assignment of bytes to the ranks that read them: pieces, the ranks that want each piece, and its owner."""
