"""Random damage to checkpoints of every layout: `python -m integration_tests.robustness.campaign`."""
