"""Registers the bridge to `torch.distributed.checkpoint`. Imports nothing heavy."""

from dcp_hooks import hookimpl

__all__ = ["dcp_register_bridges"]


@hookimpl
def dcp_register_bridges() -> dict[str, str]:
    """Register `from_stock` as the adapter of stock's storages and planners that users pass directly."""
    return {"torch.distributed.checkpoint": "dcp_bridge.bridging:from_stock"}
