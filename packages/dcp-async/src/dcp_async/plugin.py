"""Registers the savers of this package. Imports nothing heavy."""

from dcp_hooks import hookimpl

__all__ = ["dcp_register_savers"]


@hookimpl
def dcp_register_savers() -> dict[str, str]:
    """Return the saver factories by the values of `AsyncCheckpointerType`."""
    return {
        "thread": "dcp_async.savers.thread_saver:ThreadBackend",
        "process": "dcp_async.savers.process_saver:ProcessBackend",
    }
