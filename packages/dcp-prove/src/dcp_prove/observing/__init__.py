"""Observation of a running training: fingerprints of its state by name, its losses, and the samples that it reads."""
