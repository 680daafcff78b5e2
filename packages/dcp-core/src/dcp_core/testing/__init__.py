"""Test tools: storages in memory, and conformance suites that authors of plug-ins can run on their own storages."""
