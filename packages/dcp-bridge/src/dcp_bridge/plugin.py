"""Registers the bridge to `torch.distributed.checkpoint`. Imports nothing heavy."""

from dcp_hooks import hookimpl

__all__ = ["dcp_register_bridges"]


@hookimpl
def dcp_register_bridges() -> dict[str, str]:
    """`from_stock`, for storages and planners that are passed as they are."""
    return {"torch.distributed.checkpoint": "dcp_bridge.bridging:from_stock"}
