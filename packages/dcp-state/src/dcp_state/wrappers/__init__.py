"""Adapters of PyTorch's wrappers and optimizers, one file per kind; see `dcp_state.adapters`."""
