"""Tools for testing: ranks as processes, and conformance suites that third parties can run against their own parts."""
