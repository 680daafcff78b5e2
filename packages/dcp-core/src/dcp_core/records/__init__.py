"""Records of a checkpoint (metadata, plans), and the contracts that planners and storages satisfy; no work."""
