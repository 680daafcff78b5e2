"""Peers: detection of dead ranks, and the connections through which ranks reach each other."""
