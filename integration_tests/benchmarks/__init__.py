"""How fast, how lean: this library, PyTorch's own and others beside the raw floor. `nox -s bench -- --help`.

These are no tests: nothing here passes or fails by a time. The `test_*.py` beside them test the harness itself, on
small states: that a benchmark runs, compares equals, and that its pages show what was measured.
"""
