"""`HuggingFaceStorageReader`: storage reader for safetensors; loads to any sharding, and reads only the needed bytes.

Source: torch 2.13 `torch.distributed.checkpoint.hf_storage` (name, parameters, accepted files).
"""

from __future__ import annotations

import os

from dcp_core import ByteStorageReader
from dcp_core.errors import UnsupportedFormatError
from dcp_format.safetensors.hub_cache import local_store
from dcp_format.safetensors.safetensors_index import open_safetensors
from dcp_io import StoreBackend
from dcp_manifest import CheckpointIndex, file_path

__all__ = ["HuggingFaceStorageReader", "SafetensorsBackend"]

_INFLIGHT_BYTES = 64 << 20


class HuggingFaceStorageReader(ByteStorageReader):
    """Storage reader for safetensors: one file, a Hugging Face folder, or a folder of shards written by several ranks.

    Each rank reads the byte ranges that its shards of the template need, directly into contiguous tensors of the
    template. The format has no checksums: `LoadReport.unverified` lists all loaded names. A missing file is an error.

    Args:
        path: Path of a `.safetensors` file, of an `….index.json`, or of a folder with the index
            `model.safetensors.index.json`.
        thread_count: Number of threads that read.

    Ranks: every rank reads the headers, and the data of its own shards; not collective.

    Example:
        ```python
        import torch
        from safetensors.torch import save_file
        from dcp_core import load
        from dcp_format import HuggingFaceStorageReader

        save_file({"weight": torch.ones(3)}, "model.safetensors")
        state = {"weight": torch.zeros(3)}
        load(state, storage_reader=HuggingFaceStorageReader("model.safetensors"))
        ```
    """

    def __init__(self, path: str | os.PathLike[str], thread_count: int = 1) -> None:
        if thread_count < 1:
            raise ValueError(f"thread_count={thread_count} must be at least 1")
        self.thread_count = thread_count
        super().__init__(path)

    @property
    def path(self) -> str | os.PathLike[str]:
        """Path of the file or folder to read; an assigned path takes effect at the next load."""
        return self.checkpoint_id

    @path.setter
    def path(self, value: str | os.PathLike[str]) -> None:
        self.reset(value)

    @property
    def fs(self) -> None:
        """File system of the files: always None, since they are read from local folders only.

        Assigning a file system raises an error, since the property has no setter.
        """

    def _open(self, checkpoint_id: str | os.PathLike[str]) -> SafetensorsBackend:
        return SafetensorsBackend(checkpoint_id, threads=self.thread_count)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a checkpoint id is a local path."""
        return "://" not in os.fspath(checkpoint_id)


class SafetensorsBackend(StoreBackend):
    """Read-only `StoreBackend` for safetensors files.

    Args:
        path: Path of the file or folder; see `HuggingFaceStorageReader`.
        threads: Number of threads that read.
    """

    def __init__(self, path: str | os.PathLike[str], *, threads: int = 1) -> None:
        place = file_path(path)
        is_file = place.endswith((".safetensors", ".json"))
        self._place = place
        super().__init__(
            local_store((os.path.dirname(place) or ".") if is_file else place),
            threads=threads,
            max_inflight_bytes=_INFLIGHT_BYTES,
        )

    def read_index(self) -> CheckpointIndex:
        """Read the headers of the files as an index. Errors: see `open_safetensors`."""
        # A template takes every name's own bytes: nothing is gained from knowing which of them are the same.
        return open_safetensors(self._place, ties=False).index

    def begin_save(self, *, overwrite: bool, save_id: str | None = None) -> str:
        """Raise UnsupportedFormatError: this backend only reads. `HuggingFaceStorageWriter` writes safetensors."""
        del overwrite, save_id
        raise UnsupportedFormatError(f"{self._place}: write safetensors with HuggingFaceStorageWriter")
