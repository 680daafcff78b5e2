"""Peers, the other ranks of a group: detection of dead ranks, and connections between ranks."""
