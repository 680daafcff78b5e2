"""Cooperative loads on real ranks: each stored byte is read once, whatever fails."""
