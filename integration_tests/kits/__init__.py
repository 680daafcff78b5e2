"""Helpers for tests of several packages: faults of a service, damage to files, and stores of pretended hosts."""
