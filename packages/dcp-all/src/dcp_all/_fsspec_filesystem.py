"""Mirror of `torch.distributed.checkpoint._fsspec_filesystem`: re-exports only."""

from dcp_fsspec import FileSystem, FsspecReader, FsspecWriter

__all__ = ["FileSystem", "FsspecReader", "FsspecWriter"]
