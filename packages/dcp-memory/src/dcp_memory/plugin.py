"""Registration of the store in keepers by a hook. Imports nothing heavy."""

from dcp_hooks import StoreSpec, hookimpl

__all__ = ["dcp_register_stores"]


@hookimpl
def dcp_register_stores() -> list[StoreSpec]:
    """Return the store in the memory of this host."""
    return [StoreSpec("keeper", "dcp_memory.client.store:open_store")]
