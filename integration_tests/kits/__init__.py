"""Helpers for tests of several packages: faults, damage, storages in memory, pretended hosts, tensor classes, ranks."""
