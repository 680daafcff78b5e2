"""Tools for testing: storages in memory, and conformance suites that third parties can run on their own plug-ins."""
