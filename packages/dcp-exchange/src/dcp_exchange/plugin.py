"""Registration of the exchange by a hook. Does not import torch."""

from dcp_hooks import hookimpl

__all__ = ["dcp_register_exchange"]


@hookimpl
def dcp_register_exchange() -> dict[str, str]:
    """Return the function by which ranks read together."""
    return {"cooperative": "dcp_exchange.together:read_together"}
