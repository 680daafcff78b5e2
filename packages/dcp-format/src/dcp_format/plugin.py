"""Registration of this package's converters by a hook. Does not import torch."""

from dcp_base import hookimpl


@hookimpl
def dcp_register_converters() -> dict[str, str]:
    """Return format → import path of its converter."""
    return {
        "checkpoint": "dcp_format.converters:CheckpointConverter",
        "safetensors": "dcp_format.converters:SafetensorsConverter",
        "torch": "dcp_format.converters:TorchSaveConverter",
    }
