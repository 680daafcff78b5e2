"""Registration of this package's transforms by a hook. Does not import the codecs."""

from dcp_base import hookimpl


@hookimpl
def dcp_register_transforms() -> dict[str, str]:
    """Return the transforms' names in descriptors → import paths of their classes."""
    return {
        "stream.zstd": "dcp_transforms.zstd:ZStandard",
        "block.planes": "dcp_transforms.float_planes:FloatPlanes",
        "block.zstd": "dcp_transforms.block_zstd:BlockZStandard",
    }
