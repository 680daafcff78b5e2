"""Tools for testing: storages in memory, and conformance suites that third parties can run against their own parts."""
