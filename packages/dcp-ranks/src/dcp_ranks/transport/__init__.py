"""Transport of bytes between ranks: keys of a torch store, and TCP connections."""
