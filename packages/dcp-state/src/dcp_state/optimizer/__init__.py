"""Optimizer state under canonical names: reading, saving and loading without stepping the optimizer."""
