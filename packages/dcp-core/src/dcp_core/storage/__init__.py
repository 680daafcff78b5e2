"""Base classes of storage readers and writers, which read and write bytes through a `StoreBackend`."""
