"""Coverage-guided fuzzing of everything that reads bytes of a checkpoint: `nox -s fuzz -- minutes`."""
