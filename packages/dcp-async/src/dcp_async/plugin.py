"""Plug-in that registers the thread saver and the process saver. Imports nothing heavy."""

from dcp_hooks import hookimpl

__all__ = ["dcp_register_savers"]


@hookimpl
def dcp_register_savers() -> dict[str, str]:
    """Return the savers of this package: value of `AsyncCheckpointerType` → `module:attribute` of the factory."""
    return {
        "thread": "dcp_async.savers.thread_saver:ThreadBackend",
        "process": "dcp_async.savers.process_saver:ProcessBackend",
    }
