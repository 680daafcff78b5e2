"""Contents of the manager's root folder: catalogue of checkpoints, notes on them, and storages."""
