"""Storages as users meet them: addresses of an object store, and what storages say of themselves."""
