"""One file for each kind of module or optimizer of PyTorch that needs teaching; see `dcp_state.adapters`."""
