"""`ColumnBuilder`: builds the columns of a rank's tensors, chunks and objects, one tensor at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dcp_core.records.metadata import MEMORY_FORMATS, ChunkStorageMetadata, TensorProperties
from dcp_core.tables.plan_columns import PlanColumns
from dcp_manifest.index.columns import CheckpointIndex, TensorFlags

__all__ = ["ColumnBuilder", "dtype_name"]


class ColumnBuilder:
    """Builder of `PlanColumns`: add the tensors one by one, then call `columns`."""

    def __init__(self) -> None:
        self._dtypes: dict[torch.dtype, int] = {}
        self._names: list[str] = []
        self._kinds: list[tuple[int, int, int, int, int]] = []  # dtype, flags, dimensions, chunks, whole
        self._shapes: list[int] = []
        self._offsets: list[int] = []
        self._sizes: list[int] = []

    def add_plain(self, fqn: str, tensor: torch.Tensor) -> None:
        """Add an ordinary, unsharded tensor, as one chunk."""
        shape = tensor.shape
        dims = len(shape)
        self._names.append(fqn)
        flags = tensor.requires_grad | tensor.is_pinned() << 1
        self._kinds.append((self._dtypes.setdefault(tensor.dtype, len(self._dtypes)), flags, dims, 1, 1))
        if dims:
            self._shapes.extend(shape)
            self._sizes.extend(shape)
            self._offsets.extend((0,) * dims)

    def add(
        self,
        fqn: str,
        properties: TensorProperties,
        size: Sequence[int],
        chunks: Sequence[ChunkStorageMetadata],
        *,
        whole: bool,
    ) -> None:
        """Add a tensor of any kind.

        Args:
            fqn: FQN of the tensor.
            properties: Properties of the tensor, such as the dtype.
            size: Global shape of the tensor.
            chunks: Chunks that this rank holds.
            whole: Whether the tensor is an ordinary, unsharded tensor.
        """
        self._names.append(fqn)
        dtype = self._dtypes.setdefault(properties.dtype, len(self._dtypes))
        self._kinds.append((dtype, _flag_bits(properties), len(size), len(chunks), whole))
        self._shapes.extend(size)
        for chunk in chunks:
            self._offsets.extend(chunk.offsets)
            self._sizes.extend(chunk.sizes)

    def columns(self, objects: list[str], object_bytes: Sequence[int] | None = None) -> PlanColumns:
        """Return the columns of all added tensors and of objects.

        Args:
            objects: FQNs of the objects.
            object_bytes: Size of each object in bytes; None if the sizes are not known.
        """
        kinds = np.array(self._kinds, np.int64).reshape(-1, 5)
        index = CheckpointIndex(
            dtypes=tuple(map(dtype_name, self._dtypes)),
            tensor_names=self._names,
            tensor_dtype=kinds[:, 0].astype(np.uint8),
            tensor_flags=kinds[:, 1].astype(np.uint8),
            tensor_ndim=kinds[:, 2].astype(np.uint8),
            tensor_owner=np.zeros(len(kinds), np.uint32),
            tensor_shape=np.array(self._shapes, np.int64),
            tensor_chunks=kinds[:, 3].copy(),
            chunk_offsets=np.array(self._offsets, np.int64),
            chunk_sizes=np.array(self._sizes, np.int64),
            object_names=objects,
            object_owner=np.zeros(len(objects), np.uint32),
        )
        sizes = np.full(len(objects), -1, np.int64) if object_bytes is None else np.array(object_bytes, np.int64)
        return PlanColumns(index, kinds[:, 4].astype(np.uint8), sizes)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype as stored in manifests, such as `float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def _flag_bits(properties: TensorProperties) -> int:
    """Return the properties of a tensor besides its dtype, as the flag bits of manifests."""
    if properties.layout is torch.strided and properties.memory_format is torch.contiguous_format:
        return properties.requires_grad | properties.pin_memory << 1
    return TensorFlags(
        requires_grad=properties.requires_grad,
        pin_memory=properties.pin_memory,
        memory_format=MEMORY_FORMATS.index(properties.memory_format),
        layout=str(properties.layout).removeprefix("torch."),
    ).to_bits()
