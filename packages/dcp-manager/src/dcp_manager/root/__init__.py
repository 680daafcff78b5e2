"""The checkpoints under one root: catalogue, notes beside them, and storages."""
