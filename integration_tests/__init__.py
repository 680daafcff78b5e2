"""Several packages together, on real ranks; see `README.md`."""
