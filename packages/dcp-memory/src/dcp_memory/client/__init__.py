"""Clients of keepers: the store `KeeperStore`, its sinks and sources, and the lender of memory."""
