"""Mirror of `torch.distributed.checkpoint._extension`: re-exports only."""

from dcp_core.transforms import Extension, ExtensionRegistry, StreamTransformExtension
from dcp_transforms.zstd import ZStandard

__all__ = ["Extension", "ExtensionRegistry", "StreamTransformExtension", "ZStandard"]
