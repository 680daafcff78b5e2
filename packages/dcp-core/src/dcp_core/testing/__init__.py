"""Storages in memory, and conformance suites for authors of plug-ins."""
