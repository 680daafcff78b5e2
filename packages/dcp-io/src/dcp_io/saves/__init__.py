"""One save in a folder from begin to end: save marker, publishing, cleanup."""
