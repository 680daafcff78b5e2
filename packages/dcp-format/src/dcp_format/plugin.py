"""Registers the converters of this package. Imports nothing heavy."""

from dcp_hooks import hookimpl

__all__ = ["dcp_register_converters"]


@hookimpl
def dcp_register_converters() -> dict[str, str]:
    """Return the converters by the names of their formats."""
    return {
        "checkpoint": "dcp_format.formats:CheckpointConverter",
        "safetensors": "dcp_format.formats:SafetensorsConverter",
        "torch": "dcp_format.formats:TorchSaveConverter",
    }
