"""The repository keeps its own rules: the ones that no linter checks."""
