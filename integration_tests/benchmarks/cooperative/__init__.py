"""What cooperative loads cost beside independent ones: `python -m integration_tests.benchmarks.cooperative`."""
