"""Storage readers for safetensors, plain or block-quantised: they load to any sharding, and read only the needed bytes.

Source: torch 2.13 `torch.distributed.checkpoint.hf_storage` (name, parameters, accepted files), `.quantized_hf_storage`
(names, the two schemes, how parts are paired, order of the two numbers in a byte); OCP Microscaling Formats (MX) 1.0,
sections 5.3.3 (E2M1 elements) and 5.4.1 (E8M0 scales).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from dcp_base.schemes import file_path
from dcp_core import (
    ByteStorageReader,
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    Metadata,
    MetadataIndex,
    ReadItem,
    TensorStorageMetadata,
)
from dcp_core.errors import CorruptCheckpointError, UnsupportedFormatError
from dcp_format.safetensors.safetensors_index import open_safetensors
from dcp_io import LocalStore, StoreBackend
from dcp_manifest import CheckpointIndex

_INFLIGHT_BYTES = 64 << 20


class HuggingFaceStorageReader(ByteStorageReader):
    """Storage reader for safetensors: one file, a Hugging Face folder, or a folder of shards written by several ranks.

    Each rank reads the byte ranges that its shards of the template need, directly into contiguous tensors of the
    template. The format lacks checksums: `LoadReport.unverified` lists all loaded names. A missing file is an error.

    Args:
        path: Path of a `.safetensors` file, of an `….index.json`, or of a folder.
        thread_count: Number of threads that read.

    Ranks: every rank reads the headers, and the data for its shards; not collective.

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
        """None, and read-only: the files are local."""

    def _open(self, checkpoint_id: str | os.PathLike[str]) -> SafetensorsBackend:
        return SafetensorsBackend(checkpoint_id, threads=self.thread_count)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a checkpoint id is a local path."""
        return "://" not in os.fspath(checkpoint_id)


class SafetensorsBackend(StoreBackend):
    """Read-only `StoreBackend` for safetensors files."""

    def __init__(self, path: str | os.PathLike[str], *, threads: int = 1) -> None:
        place = file_path(path)
        is_file = place.endswith((".safetensors", ".json"))
        self._place = place
        super().__init__(
            LocalStore((os.path.dirname(place) or ".") if is_file else place),
            threads=threads,
            max_inflight_bytes=_INFLIGHT_BYTES,
        )

    def read_index(self, boxes: object = None) -> CheckpointIndex:
        """Read the headers of the files as an index."""
        del boxes
        # A template takes every name's own bytes: nothing is gained from knowing which of them are the same.
        return open_safetensors(self._place, ties=False).index

    def begin_save(self, *, overwrite: bool, save_id: str | None = None) -> str:
        """Raise UnsupportedFormatError: this backend only reads."""
        del overwrite, save_id
        raise UnsupportedFormatError(f"{self._place}: write safetensors with HuggingFaceStorageWriter")


_SCALE, _WEIGHT = ".weight_scale_inv", ".weight"
_SCALES, _BLOCKS = "_scales", "_blocks"


@dataclass(frozen=True, slots=True)
class _Pair:
    values: str
    scales: str
    packed: bool
    """Whether a byte holds two 4-bit numbers, in blocks along the last dimension (MXFP4)."""


class QuantizedHuggingFaceStorageReader(HuggingFaceStorageReader):
    """Storage reader that dequantises block-quantised safetensors to tensors of `target_dtype`.

    Quantised tensors are the pairs `X.weight` with `X.weight_scale_inv`, and `X_blocks` with `X_scales` (MXFP4). In the
    template their names are `X.weight` and `X_blocks` (or `X`). Other tensors are loaded as they are stored.

    Args:
        path: See `HuggingFaceStorageReader`, also for `thread_count`.
        thread_count: Number of threads that read.
        target_dtype: Dtype of dequantised tensors, also in the metadata.
        block_size: Number of rows and columns of a block of a matrix; each block has one scale.

    Example:
        ```python
        import torch
        from safetensors.torch import save_file
        from dcp_core import load
        from dcp_format import QuantizedHuggingFaceStorageReader

        values = torch.ones(128, 128).to(torch.float8_e4m3fn)
        save_file({"head.weight": values, "head.weight_scale_inv": torch.full((1, 1), 2.0)}, "model.safetensors")
        state = {"head.weight": torch.zeros(128, 128)}
        load(state, storage_reader=QuantizedHuggingFaceStorageReader("model.safetensors"))
        assert state["head.weight"].mean() == 2
        ```
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        thread_count: int = 1,
        target_dtype: torch.dtype = torch.float32,
        block_size: int = 128,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size={block_size} must be at least 1")
        self.target_dtype = target_dtype
        self.block_size = block_size
        self._pairs: dict[str, _Pair] = {}
        self._raw: Metadata | None = None
        super().__init__(path, thread_count)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata, with sizes and dtype of dequantised tensors."""
        stored = super().read_metadata(*args, **kwargs)
        self._raw = stored
        self._pairs = _pairs(stored)
        entries: dict[str, Any] = dict(stored.state_dict_metadata)
        places = dict(stored.storage_data or {})
        by_name = {key.fqn: value for key, value in places.items()}
        for name, pair in self._pairs.items():
            entry = self._logical(name, pair, self._entry(pair.values), self._entry(pair.scales))
            entries[name] = entry
            places[MetadataIndex(name, [0] * len(entry.size), 0)] = by_name[pair.values]
        return replace(stored, state_dict_metadata=entries, storage_data=places)

    def _logical(
        self, name: str, pair: _Pair, values: TensorStorageMetadata, scales: TensorStorageMetadata
    ) -> TensorStorageMetadata:
        size = values.size
        if len(values.chunks) != 1 or len(scales.chunks) != 1:
            raise CorruptCheckpointError(
                "a quantised tensor is stored in several parts; consolidate the files", key=name
            )
        if pair.packed:
            wanted = size[:-1]
            size = torch.Size((*size[:-2], size[-2] * size[-1] * 2))
        else:
            wanted = torch.Size(-(-length // self.block_size) for length in size)
        if scales.size != wanted:
            raise CorruptCheckpointError(
                f"the scales have sizes {tuple(scales.size)}, and the values ask for {tuple(wanted)}: check block_size",
                key=name,
            )
        chunk = replace(values.chunks[0], offsets=torch.Size([0] * len(size)), sizes=size)
        return TensorStorageMetadata(replace(values.properties, dtype=self.target_dtype), size, [chunk])

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Read all items of the plan; quantised tensors are read one at a time."""
        if self._raw is None:
            self._pairs, self._raw = {}, self._metadata
        logical = self._metadata
        quantised = [item for item in plan.items if item.storage_index.fqn in self._pairs]
        plain = [item for item in plan.items if item.storage_index.fqn not in self._pairs]
        done = super().read_data(LoadPlan(plain), planner)
        total, unverified = self.bytes_read, set(self.unverified_keys)
        self._metadata = self._raw
        try:
            for item in quantised:
                values = self._dequantised(item, self._pairs[item.storage_index.fqn])
                total += self.bytes_read
                unverified |= self.unverified_keys
                target = planner.resolve_tensor(item).detach()
                target.copy_(values)
                planner.commit_tensor(item, target)
        finally:
            self._metadata = logical
        self.bytes_read, self.unverified_keys = total, unverified
        return done

    def _dequantised(self, item: ReadItem, pair: _Pair) -> torch.Tensor:
        offsets, lengths = list(item.storage_offsets), list(item.lengths)
        if not pair.packed:
            side = self.block_size
            first = [at // side for at in offsets]
            count = [
                -(-(at + n) // side) - start if n else 0 for at, n, start in zip(offsets, lengths, first, strict=True)
            ]
            values, scales = self._boxes((pair.values, offsets, lengths), (pair.scales, first, count))
            inside = [at - start * side for at, start in zip(offsets, first, strict=True)]
            return _dequantize_blocks(values, scales, side, inside).to(self.target_dtype)
        block = self._entry(pair.values).size[-1]
        low = offsets[-1] // (2 * block)
        groups = -(-(offsets[-1] + lengths[-1]) // (2 * block)) - low
        start, size = [*offsets[:-1], low], [*lengths[:-1], groups]
        values, scales = self._boxes((pair.values, [*start, 0], [*size, block]), (pair.scales, start, size))
        whole = dequantize_mxfp4(values, scales)
        return whole.narrow(-1, offsets[-1] - low * 2 * block, lengths[-1]).to(self.target_dtype)

    def _entry(self, name: str) -> TensorStorageMetadata:
        entry = None if self._raw is None else self._raw.state_dict_metadata.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            raise CorruptCheckpointError("it is not in the files any more", key=name)
        return entry

    def _boxes(self, *wanted: tuple[str, Sequence[int], Sequence[int]]) -> list[torch.Tensor]:
        buffers: dict[str, torch.Tensor] = {}
        items = []
        for name, offsets, lengths in wanted:
            buffers[name] = torch.empty(tuple(lengths), dtype=self._entry(name).properties.dtype, device="cpu")
            index = MetadataIndex(name, [0] * len(lengths), 0)
            zero = torch.Size([0] * len(lengths))
            items.append(ReadItem(LoadItemType.TENSOR, index, zero, index, torch.Size(offsets), torch.Size(lengths)))
        super().read_data(LoadPlan(items), cast("LoadPlanner", _Buffers(buffers)))
        return [buffers[name] for name, _, _ in wanted]


class _Buffers:
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self._tensors[read_item.dest_index.fqn]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Do nothing: the tensor is already in its destination."""


def _pairs(metadata: Metadata) -> dict[str, _Pair]:
    names = metadata.state_dict_metadata.keys()
    pairs: dict[str, _Pair] = {}
    for scales in names:
        if scales.endswith(_SCALE) and (values := scales.removesuffix(_SCALE) + _WEIGHT) in names:
            pairs[values] = _Pair(values, scales, packed=False)
        elif scales.endswith(_SCALES) and (values := scales.removesuffix(_SCALES) + _BLOCKS) in names:
            pair = _Pair(values, scales, packed=True)
            pairs[values] = pair
            if (plain := scales.removesuffix(_SCALES)) not in names:
                pairs[plain] = pair
    return pairs


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SCALE_BIAS = 127


def _dequantize_blocks(
    values: torch.Tensor, scales: torch.Tensor, block_size: int, offsets: Sequence[int]
) -> torch.Tensor:
    wide = scales.to(torch.float32)
    for dim, (offset, length) in enumerate(zip(offsets, values.shape, strict=True)):
        wide = wide.repeat_interleave(block_size, dim).narrow(dim, offset, length)
    return values.to(torch.float32) * wide


def dequantize_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantise MXFP4: 4-bit numbers, two per byte (low half first), with a power of two as the scale per block.

    `blocks` is uint8 with sizes (…, G, B): G blocks of B bytes per row; `scales` is uint8 with sizes (…, G): exponents
    with a bias of 127.
    """
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.float32, device="cpu")
    pairs = torch.stack((blocks & 0x0F, blocks >> 4), dim=-1)
    exponents = scales.to(torch.int32) - _SCALE_BIAS
    values = torch.ldexp(table[pairs.to(torch.int64)], exponents[..., None, None])
    return values.reshape(*blocks.shape[:-2], blocks.shape[-2] * blocks.shape[-1] * 2)
