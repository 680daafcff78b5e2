"""One save after the other on every rank alike, with overlap policies."""
