"""Conformance suites for authors of plug-ins, and what these suites need."""
