"""How fast, how lean: this library, PyTorch's own and others beside the raw floor. `nox -s bench -- --help`."""
