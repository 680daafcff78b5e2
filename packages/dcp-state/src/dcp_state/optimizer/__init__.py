"""Optimizer state under canonical names: found, saved and fitted without touching the optimizer."""
