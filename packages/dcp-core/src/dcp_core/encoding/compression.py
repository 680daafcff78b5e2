"""The `compression` setting of a storage writer: which transforms encode which items of a save.

The transforms themselves are plug-ins, which this module finds by name.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import torch

from dcp_core.encoding.block_transforms import BlockChain, BlockTransformExtension, block_bytes
from dcp_core.encoding.transforms import Extension, ExtensionRegistry, StreamTransformExtension
from dcp_io.requests import Payload, StreamEncoder, Writable
from dcp_manifest.index.items import Framing

__all__ = ["CompressedRequest", "Compression", "CompressionPolicy", "one_setting"]

Compression: TypeAlias = "str | Extension | Sequence[str | Extension] | Mapping[torch.dtype | str, Any] | None"
"""A `compression` setting: a name (`auto`, `adaptive`, `planes`, `zstd`, `none` or a transform's descriptor), a
transform, several transforms that form a chain, or a mapping of dtypes or glob patterns of FQNs to such settings."""

_NAMES = {"zstd": "stream.zstd/1", "planes": "block.planes/1"}
_CHOICES = "auto, adaptive, planes, zstd, none"
_AUTO = ("block.planes/1", "block.zstd/1")
_FLOATS = ("float", "bfloat", "complex")
# Smaller tensors are stored as they are: an index of blocks costs more than they could save.
_MIN_BYTES = 4 << 10
# A tensor is encoded only if a sample of it shrinks by at least this share.
_MIN_GAIN = 0.03
_SAMPLED_PART = 32
_MIN_SAMPLE_BYTES, _MAX_SAMPLE_BYTES = 8 << 10, 128 << 10
_WINDOWS = 4
_WINDOW_ALIGNMENT_BYTES = 64


def one_setting(extensions: Sequence[StreamTransformExtension] | None, compression: Compression) -> Compression:
    """Return the one of two arguments that was given, for writers that also accept stock's argument `_extensions`.

    Args:
        extensions: Value of the argument `_extensions`, transforms of streams; None if not given.
        compression: Value of the argument `compression`; None if not given.

    Raises:
        ValueError: Both arguments were given, or an extension is not a transform of streams.
    """
    for extension in extensions or ():
        if not (hasattr(extension, "transform_to") and hasattr(extension, "get_descriptor")):
            raise ValueError(f"_extensions holds {extension!r}, which is no transform of streams")
    if extensions and compression is not None:
        raise ValueError("_extensions and compression say the same thing: give one of them")
    return extensions or compression


@dataclass(frozen=True, slots=True)
class _Rule:
    """The transforms for some items: transforms of streams, or the best of several chains of block transforms."""

    streams: tuple[StreamEncoder, ...] = ()
    blocks: tuple[tuple[BlockTransformExtension, ...], ...] = ()
    floats: int | None = None
    """Number of the chains that are tried on floating-point tensors; None for all."""

    def apply(self, payload: Payload) -> Payload:
        if self.streams:
            return replace(payload, encoders=self.streams)
        size = len(payload.data) if isinstance(payload.data, bytes | memoryview) else payload.data.nbytes
        if not self.blocks or payload.framing is not Framing.RAW or payload.dtype is None or size < _MIN_BYTES:
            return payload
        sample, least = _sample(payload, size), 1 - _MIN_GAIN
        best: BlockChain | None = None
        tried = self.blocks[: self.floats] if payload.dtype.startswith(_FLOATS) else self.blocks
        for transforms in tried:
            *outer, inner = transforms
            suited, share = inner.for_item(sample, payload.dtype)
            chain = BlockChain((*outer, suited), payload.dtype, block_bytes(size))
            if outer:
                share = len(chain.encode(sample)) / len(sample)
            if share <= least:
                best, least = chain, share
        return payload if best is None else replace(payload, blocks=best)


class CompressionPolicy:
    """A validated `compression` setting, which chooses the transforms for each item of a save.

    Args:
        setting: A name (`auto`, `adaptive`, `planes`, `zstd`, `none` or the descriptor of a transform), a transform,
            a chain (several of these), or a mapping of dtypes or glob patterns of FQNs to such settings. `auto` and
            `planes` store each tensor in blocks if that makes the tensor smaller; a reader can decode single blocks.
            `auto` uses float planes for floats, and the better of float planes and Zstandard for other dtypes;
            `adaptive` is `auto` where that does not make the save slower, and else `none`. `zstd` stores each item as
            one stream, which `torch.distributed.checkpoint` reads too. In a chain, the first transform produces the
            stored bytes. In a mapping, the first entry whose dtype or glob pattern matches an item applies; items
            without a matching entry are stored unchanged, as are all items with `none` or None.

    Raises:
        ValueError: The setting has none of these forms, or a chain mixes transforms of streams and of blocks.
        UnsupportedFormatError: A transform is not installed; the message names the package to install.
    """

    def __init__(self, setting: Compression) -> None:
        self.adapts = isinstance(setting, str) and setting == "adaptive"
        """Whether a writer is to compress only if that does not make the save slower; see `encoding.adaptive`."""
        by_key = setting if isinstance(setting, Mapping) else {"*": "auto" if self.adapts else setting}
        self._rules = [(*_dtype_or_pattern(key), _rule(value)) for key, value in by_key.items()]

    @property
    def changes_nothing(self) -> bool:
        """Whether all items are stored unchanged."""
        return not any(rule.streams or rule.blocks for _, _, rule in self._rules)

    def apply(self, key: str, payload: Payload) -> Payload:
        """Return an item's payload, encoded by the transforms that the policy chooses for this item.

        Args:
            key: FQN of the item.
            payload: Payload without transforms.
        """
        for dtype, pattern, rule in self._rules:
            if dtype in (None, payload.dtype) and fnmatch.fnmatchcase(key, pattern):
                return rule.apply(payload)
        return payload


class CompressedRequest:
    """A write request whose payload is encoded by the transforms that a policy chooses.

    Args:
        request: Request for the payload before compression.
        policy: Policy that chooses the transforms, called in a writer thread when the item is written.
    """

    __slots__ = ("_policy", "_request", "abandon", "cost_bytes", "key", "urgent")

    def __init__(self, request: Writable, policy: CompressionPolicy) -> None:
        self._request = request
        self._policy = policy
        self.key = request.key
        self.cost_bytes = request.cost_bytes
        self.urgent: bool = getattr(request, "urgent", False)
        self.abandon: Callable[[], object] | None = getattr(request, "abandon", None)

    def resolve(self) -> Payload:
        """Return the payload of the request; the transforms encode the bytes during writing."""
        return self._policy.apply(self.key, self._request.resolve())


def _dtype_or_pattern(key: Any) -> tuple[str | None, str]:
    """Return the dtype and the name pattern of a mapping's key; the dtype is None if the key fits all dtypes."""
    if not isinstance(key, torch.dtype | str):
        raise ValueError(f"compression has the key {key!r}; keys are dtypes or patterns of names")  # noqa: TRY004 - one error for a bad setting
    name = str(key).removeprefix("torch.")
    is_dtype = isinstance(getattr(torch, name, None), torch.dtype)
    return (name, "*") if is_dtype else (None, str(key))


def _rule(setting: Any) -> _Rule:
    if isinstance(setting, str) and setting == "adaptive":
        raise ValueError("compression='adaptive' is a choice for a whole save: give it alone, not in a mapping")
    if setting is None or setting == "none":
        return _Rule()
    if setting == "auto":
        found = ExtensionRegistry().from_descriptor_list(_AUTO)
        # Bytes that repeat among floats repeat in their planes, too.
        return _Rule(blocks=tuple((cast("BlockTransformExtension", each),) for each in found), floats=1)
    links = [setting] if isinstance(setting, str) or not isinstance(setting, Sequence) else list(setting)
    chain = [_extension(each) for each in links]
    if all(hasattr(each, "transform_to") and hasattr(each, "get_descriptor") for each in chain):
        return _Rule(streams=tuple(cast("list[StreamEncoder]", chain)))
    if all(hasattr(each, "encode_block") for each in chain):
        return _Rule(blocks=(tuple(cast("list[BlockTransformExtension]", chain)),))
    if all(hasattr(each, "transform_to") or hasattr(each, "encode_block") for each in chain):
        raise ValueError(f"compression={setting!r} mixes transforms of streams and of blocks; choose one kind")
    raise ValueError(f"compression={setting!r} is no transform: choose {_CHOICES}, or a transform")


def _extension(setting: Any) -> Any:
    if not isinstance(setting, str):
        return setting
    descriptor = _NAMES.get(setting, setting)
    if "." not in descriptor:
        raise ValueError(f"compression={setting!r} is not known: choose {_CHOICES}, or a descriptor")
    (extension,) = ExtensionRegistry().from_descriptor_list([descriptor])
    return extension


def _sample(payload: Payload, size: int) -> memoryview:
    """Return a sample of elements from all over the payload; of a piecewise payload, its first elements."""
    wanted = min(size, max(_MIN_SAMPLE_BYTES, min(size // _SAMPLED_PART, _MAX_SAMPLE_BYTES)))
    data = payload.data
    if not isinstance(data, bytes | memoryview):
        return memoryview(bytes(next(data.pieces(wanted))))
    view = memoryview(data)
    if wanted == size:
        return view
    window = wanted // _WINDOWS // _WINDOW_ALIGNMENT_BYTES * _WINDOW_ALIGNMENT_BYTES
    step = (size - window) // (_WINDOWS - 1) // _WINDOW_ALIGNMENT_BYTES * _WINDOW_ALIGNMENT_BYTES
    return memoryview(b"".join(view[start : start + window] for start in range(0, _WINDOWS * step, step)))
