"""Proofs of exact resumes: training loops in the style of public ones, in which one part is left out of the checkpoint."""
