"""Records of metadata and plans, and the contracts (protocols) of planners, storages and stateful objects."""
