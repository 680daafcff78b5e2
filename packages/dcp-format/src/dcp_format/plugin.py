"""Registration of this package's converters by a hook. Does not import torch."""

from dcp_hooks import hookimpl

__all__ = ["dcp_register_converters"]


@hookimpl
def dcp_register_converters() -> dict[str, str]:
    """Return name of each format → import path of its converter."""
    return {
        "checkpoint": "dcp_format.formats:CheckpointConverter",
        "safetensors": "dcp_format.formats:SafetensorsConverter",
        "torch": "dcp_format.formats:TorchSaveConverter",
    }
