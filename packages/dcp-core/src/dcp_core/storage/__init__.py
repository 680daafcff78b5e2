"""Base classes of storage readers and writers: they turn items into reads and writes of bytes by a `StoreBackend`."""
