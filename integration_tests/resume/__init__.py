"""Proofs of exact resumes: loops in the style of public ones, which leave one part out of the checkpoint."""
