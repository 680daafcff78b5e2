"""Detect dead ranks and connect ranks."""
