"""Registers the transforms of this package. Imports nothing heavy."""

from dcp_hooks import hookimpl

__all__ = ["dcp_register_transforms"]


@hookimpl
def dcp_register_transforms() -> dict[str, str]:
    """Return the transforms by the names in their descriptors."""
    return {
        "stream.zstd": "dcp_transforms.zstd:ZStandard",
        "block.planes": "dcp_transforms.float_planes:FloatPlanes",
        "block.zstd": "dcp_transforms.block_zstd:BlockZStandard",
    }
