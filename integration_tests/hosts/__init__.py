"""Tiers of each host, on real ranks and pretended hosts."""
