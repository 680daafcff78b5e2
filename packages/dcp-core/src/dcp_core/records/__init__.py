"""The nouns of a checkpoint, and the contracts that planners and storages sign; no work."""
