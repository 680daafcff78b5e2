"""Registration of the bridge to `torch.distributed.checkpoint` by a hook. Does not import torch."""

from dcp_hooks import hookimpl

__all__ = ["dcp_register_bridges"]


@hookimpl
def dcp_register_bridges() -> dict[str, str]:
    """Return name of stock's package → import path of `from_stock`, which adapts its storages and planners."""
    return {"torch.distributed.checkpoint": "dcp_bridge.bridging:from_stock"}
