"""Mirror of `torch.distributed.checkpoint._extension`: re-exports only."""

from dcp_core.transforms import Extension as Extension
from dcp_core.transforms import ExtensionRegistry as ExtensionRegistry
from dcp_core.transforms import StreamTransformExtension as StreamTransformExtension
from dcp_transforms.zstd import ZStandard as ZStandard
