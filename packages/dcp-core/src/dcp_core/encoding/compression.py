"""The `compression` setting of storage writers, and the contracts of transforms."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch

from dcp_base.imports import import_part
from dcp_io.requests import Payload, StreamEncoder, Writable
from dcp_manifest.index.columns import Framing

if TYPE_CHECKING:
    from dcp_io import StoreBackend
    from dcp_manifest.index.stored_items import StoredItems
import io
from abc import ABC, abstractmethod
from typing import IO

from dcp_core import plugins
from dcp_core.errors import CorruptCheckpointError, PluginNotFoundError, UnsupportedFormatError
from dcp_io.archives.archive_checks import archive_problem
from dcp_manifest.index.columns import StoredItem

Compression: TypeAlias = "str | Extension | Sequence[str | Extension] | Mapping[torch.dtype | str, Any] | None"
"""See `CompressionPolicy`; also `adaptive`."""

_NAMES = {"zstd": "stream.zstd/1", "planes": "block.planes/1"}
_CHOICES = "auto, adaptive, planes, zstd, none"
_AUTO = ("block.planes/1", "block.zstd/1")
_FLOATS = ("float", "bfloat", "complex")
# Smaller tensors are stored unchanged: an index of blocks costs more than compression saves.
_MIN_BYTES = 4 << 10
# A tensor is encoded only if a sample shrinks by at least this share.
_MIN_GAIN = 0.03
_SAMPLED_PART = 32
_MIN_SAMPLE_BYTES, _MAX_SAMPLE_BYTES = 8 << 10, 128 << 10
_WINDOWS = 4
_WINDOW_ALIGNMENT_BYTES = 64


def one_setting(extensions: Sequence[StreamTransformExtension] | None, compression: Compression) -> Compression:
    """Return `compression` or stock's `_extensions`, but not both."""
    for extension in extensions or ():
        if not (hasattr(extension, "transform_to") and hasattr(extension, "get_descriptor")):
            raise ValueError(f"_extensions holds {extension!r}, which is not a transform of streams")
    if extensions and compression is not None:
        raise ValueError("_extensions and compression mean the same: pass only one of them")
    return extensions or compression


def compression_policy(setting: Compression) -> CompressionPolicy:
    """Return the policy of a setting."""
    if isinstance(setting, str) and setting == "adaptive":
        return cast("CompressionPolicy", import_part("adaptive")())
    return CompressionPolicy(setting)


@dataclass(frozen=True, slots=True)
class _Rule:
    streams: tuple[StreamEncoder, ...] = ()
    blocks: tuple[tuple[BlockTransformExtension, ...], ...] = ()
    floats: int | None = None

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
    """A validated `compression` setting, which chooses each item's transforms.

    Args:
        setting: A name (`auto`, `planes`, `zstd`, `none` or a transform's descriptor), a transform, a chain of these,
            or a mapping of dtypes or glob patterns of FQNs to settings. `auto` and `planes` store a tensor in blocks if
            that is smaller; readers can decode single blocks. `auto` uses float planes for floats, and the better of
            float planes and Zstandard for other dtypes. `zstd` stores each item as one stream, which stock can read.
            The first transform of a chain produces the stored bytes. A mapping's first match applies; other items are
            unchanged.

    Raises:
        ValueError: The setting has another form, or a chain mixes stream and block transforms.
        UnsupportedFormatError: A transform is not installed.
    """

    def __init__(self, setting: Compression) -> None:
        by_key = setting if isinstance(setting, Mapping) else {} if setting is None else {"*": setting}
        self._rules = [(*_dtype_or_pattern(key), _rule(value)) for key, value in by_key.items()]
        self.changes_nothing = not [rule for _, _, rule in self._rules if rule.streams or rule.blocks]
        """Whether all items are stored unchanged."""

    def apply(self, key: str, payload: Payload) -> Payload:
        """Add an item's transforms."""
        for dtype, pattern, rule in self._rules:
            if dtype in (None, payload.dtype) and fnmatch.fnmatchcase(key, pattern):
                return rule.apply(payload)
        return payload

    def write(self, backend: StoreBackend, requests: Sequence[Writable], *, prefix: str, save_id: str) -> StoredItems:
        """Write encoded items; see `StoreBackend.write`."""
        if not self.changes_nothing:
            requests = [CompressedRequest(request, self) for request in requests]
        return backend.write(requests, prefix=prefix, save_id=save_id)


class CompressedRequest:
    """Encodes a write request in a writer thread."""

    __slots__ = ("_policy", "_request", "cost_bytes", "key")
    alike = None

    def __init__(self, request: Writable, policy: CompressionPolicy) -> None:
        self._request = request
        self._policy = policy
        self.key = request.key
        self.cost_bytes = request.cost_bytes

    def resolve(self) -> Payload:
        """Return the payload with its transforms."""
        return self._policy.apply(self.key, self._request.resolve())


def _dtype_or_pattern(key: Any) -> tuple[str | None, str]:
    if not isinstance(key, torch.dtype | str):
        raise ValueError(f"compression has the key {key!r}; keys are dtypes or patterns of names")  # noqa: TRY004 - one error for a bad setting
    name = str(key).removeprefix("torch.")
    is_dtype = isinstance(getattr(torch, name, None), torch.dtype)
    return (name, "*") if is_dtype else (None, str(key))


def _rule(setting: Any) -> _Rule:
    if isinstance(setting, str) and setting == "adaptive":
        raise ValueError("compression='adaptive' chooses for whole saves: pass it alone, to a storage writer")
    if setting is None or setting == "none":
        return _Rule()
    if setting == "auto":
        found = ExtensionRegistry().from_descriptor_list(_AUTO)
        # Repetition among floats also shows in their planes.
        return _Rule(blocks=tuple((cast("BlockTransformExtension", each),) for each in found), floats=1)
    links = [setting] if isinstance(setting, str) or not isinstance(setting, Sequence) else list(setting)
    chain = [_extension(each) for each in links]
    if all(hasattr(each, "transform_to") and hasattr(each, "get_descriptor") for each in chain):
        return _Rule(streams=tuple(cast("list[StreamEncoder]", chain)))
    if all(hasattr(each, "encode_block") for each in chain):
        return _Rule(blocks=(tuple(cast("list[BlockTransformExtension]", chain)),))
    if all(hasattr(each, "transform_to") or hasattr(each, "encode_block") for each in chain):
        raise ValueError(f"compression={setting!r} mixes transforms of streams and of blocks; choose one kind")
    raise ValueError(f"compression={setting!r} is not a transform: choose {_CHOICES}, or a transform")


def _extension(setting: Any) -> Any:
    if not isinstance(setting, str):
        return setting
    descriptor = _NAMES.get(setting, setting)
    if "." not in descriptor:
        raise ValueError(f"compression={setting!r} is not known: choose {_CHOICES}, or the name of a transform")
    registry = ExtensionRegistry()
    return registry.from_descriptor_list([descriptor])[0] if "/" in descriptor else registry.default_of(descriptor)


def _sample(payload: Payload, size: int) -> memoryview:
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


_STEP_BYTES = 1 << 20


class Extension(ABC):
    """Contract of a transform of stored bytes."""

    @staticmethod
    @abstractmethod
    def registry_name() -> str:
        """Return the descriptor without `/version`."""

    @staticmethod
    @abstractmethod
    def from_descriptor(version: str) -> Extension:
        """Return the transform for a version, or raise ValueError."""

    @abstractmethod
    def get_descriptor(self) -> str:
        """Return the descriptor for the index, `name/version`."""


class StreamTransformExtension(Extension):
    """Encodes an item's bytes as one stream. Threads share an instance, each with its own streams."""

    @abstractmethod
    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        """Return a stream that encodes to `output`; closing it completes the encoding."""

    @abstractmethod
    def transform_from(self, input: IO[bytes]) -> IO[bytes]:  # noqa: A002 - stock's name
        """Return a stream of the decoded bytes of `input`."""


class ExtensionRegistry:
    """Registry of transforms; registered ones precede plug-ins'."""

    def __init__(self) -> None:
        self.extensions: dict[str, type[Extension]] = {}

    def register(self, cls: type[Extension]) -> None:
        """Add a class, replacing one of the same `registry_name`."""
        self.extensions[cls.registry_name()] = cls

    def from_descriptor_list(self, descriptors: Sequence[str]) -> Sequence[Extension]:
        """Return the transforms; UnsupportedFormatError if one is missing."""
        return [self._from(descriptor) for descriptor in descriptors]

    def default_of(self, name: str) -> Extension:
        """Return a transform with default settings."""
        found = self._class_of(name)
        try:
            return found()
        except TypeError as error:
            raise ValueError(f"the transform {name!r} needs settings: write {name}/VERSION ({error})") from error

    def _class_of(self, descriptor: str) -> type[Extension]:
        try:
            found = self.extensions.get(descriptor.partition("/")[0]) or plugins.transform(descriptor)
        except PluginNotFoundError as error:
            raise UnsupportedFormatError(str(error)) from error
        return cast("type[Extension]", found)

    def _from(self, descriptor: str) -> Extension:
        found = self._class_of(descriptor)
        try:
            return found.from_descriptor(descriptor.partition("/")[2])
        except ValueError as error:
            raise UnsupportedFormatError(
                f"the transform {descriptor!r} is not known to {found.__qualname__}: {error}; install a version of its "
                "package that knows it"
            ) from error


class ItemStreams:
    """Streams of single items, for writers that use stock's `_write_item`.

    Source: torch 2.13 `torch.distributed.checkpoint.filesystem._StorageWriterTransforms`.
    """

    def __init__(self, extensions: Sequence[StreamTransformExtension] | None = None) -> None:
        self.extensions = tuple(extensions or ())

    def transform_save_stream(self, write_item: object, raw_stream: IO[bytes]) -> tuple[IO[bytes], list[str]]:
        """Return a stream that encodes into an open file, and the descriptors."""
        del write_item
        stream = cast("IO[bytes]", _ItemStream(raw_stream))
        for extension in self.extensions:
            stream = extension.transform_to(stream)
        return stream, [extension.get_descriptor() for extension in reversed(self.extensions)]


class _ItemStream(io.RawIOBase):
    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def undo(data: memoryview, stored: StoredItem, key: str, registry: ExtensionRegistry, limit_bytes: int) -> memoryview:
    """Decode stored bytes with verified CRCs, to at most `limit_bytes`.

    Without a CRC in the index, a zip archive's own CRCs are checked.
    """
    stream = cast("IO[bytes]", io.BytesIO(data))
    for descriptor, extension in zip(stored.chain, transforms_of(stored, key, registry), strict=True):
        if not isinstance(extension, StreamTransformExtension) and not hasattr(extension, "transform_from"):
            raise UnsupportedFormatError(
                f"{key!r} in {stored.file}: the transform {descriptor!r} is not a stream transform"
            )
        stream = cast("StreamTransformExtension", extension).transform_from(stream)
    try:
        decoded = _read_up_to(stream, limit_bytes)
    except Exception as error:
        raise _damage(stored, key, f"it cannot be decoded: {type(error).__name__}: {error}") from error
    if len(decoded) > limit_bytes:
        raise _damage(stored, key, f"it decodes to more than {limit_bytes:,} bytes")
    if stored.crc32 is None and stored.framing is not Framing.RAW:
        problem = archive_problem(decoded)
        if problem is not None:
            raise _damage(stored, key, problem)
    return memoryview(decoded)


def transforms_of(stored: StoredItem, key: str, registry: ExtensionRegistry) -> Sequence[Extension]:
    """Return an item's transforms in decoding order."""
    try:
        return registry.from_descriptor_list(stored.chain)
    except UnsupportedFormatError as error:
        raise UnsupportedFormatError(f"{key!r} in {stored.file} cannot be decoded: {error}") from error


def _read_up_to(stream: IO[bytes], limit_bytes: int) -> bytearray:
    decoded = bytearray()
    while len(decoded) <= limit_bytes and (piece := stream.read(_STEP_BYTES)):
        decoded += piece
    return decoded


def _damage(stored: StoredItem, key: str, what: str) -> CorruptCheckpointError:
    names = ", ".join(map(repr, stored.chain))
    return CorruptCheckpointError(
        f"the data is stored through {names}, and {what}", file=stored.file, key=key, offset=stored.offset
    )


_MIN_BLOCK_BYTES = 256 << 10
_MAX_BLOCK_BYTES = 1 << 20
_BLOCKS_PER_ITEM = 128
# Between two transforms of a chain, a block may be slightly longer than at the end.
_MARGIN_BYTES = 64 << 10


class BlockTransformExtension(Extension):
    """Compresses blocks of a tensor's bytes.

    Blocks that do not shrink are stored unencoded, so encryption must be a `StreamTransformExtension`. Threads share an
    instance. Encoding and decoding should release the GIL. Each `dtype` is a torch dtype without `torch.`.
    """

    def for_item(self, sample: memoryview, dtype: str) -> tuple[BlockTransformExtension, float]:
        """Return the transform for a sample of elements, and the estimated ratio of encoded to original size.

        It may be another instance with the same descriptor.
        """
        return self, len(self.encode_block(sample, dtype)) / len(sample)

    @abstractmethod
    def encode_block(self, block: memoryview, dtype: str) -> bytes | bytearray | memoryview:
        """Encode whole elements, at most 1 MiB; the thread's next call may reuse the memory.

        `dtype` is `uint8` for another transform's output.
        """

    @abstractmethod
    def decoded_bytes(self, data: memoryview) -> int:
        """Return a block's decoded bytes, or raise ValueError."""

    @abstractmethod
    def decode_block(self, data: memoryview, into: memoryview) -> None:
        """Decode a block, with a verified CRC, into `decoded_bytes(data)` bytes; raise if it is damaged."""


class BlockChain:
    """Encodes blocks by a chain, last transform first."""

    __slots__ = ("_dtype", "_transforms", "block_bytes", "descriptors")

    def __init__(self, transforms: Sequence[BlockTransformExtension], dtype: str, block_bytes: int) -> None:
        self._transforms = tuple(transforms)
        self._dtype = dtype
        self.block_bytes = block_bytes
        self.descriptors = tuple(each.get_descriptor() for each in transforms)

    def encode(self, block: memoryview) -> bytes | bytearray | memoryview:
        """Encode one block."""
        data: bytes | bytearray | memoryview = block
        dtype = self._dtype
        for transform in reversed(self._transforms):
            data = transform.encode_block(memoryview(data), dtype)
            dtype = "uint8"
        return data


class BlockUndo:
    """Decodes blocks, checking sizes before allocating memory."""

    __slots__ = ("_transforms",)

    def __init__(self, transforms: Sequence[BlockTransformExtension]) -> None:
        self._transforms = tuple(transforms)

    def decode(self, data: memoryview, into: memoryview) -> None:
        """Decode a block; ValueError if the sizes differ."""
        *outer, inner = self._transforms
        for transform in outer:
            size = transform.decoded_bytes(data)
            if not 0 <= size <= 2 * len(into) + _MARGIN_BYTES:
                raise ValueError(f"it declares {size:,} intermediate bytes for {len(into):,} decoded bytes")
            between = memoryview(bytearray(size))
            transform.decode_block(data, between)
            data = between
        size = inner.decoded_bytes(data)
        if size != len(into):
            raise ValueError(f"it declares {size:,} decoded bytes, not {len(into):,}")
        inner.decode_block(data, into)


def block_undo(stored: StoredItem, key: str, registry: ExtensionRegistry) -> BlockUndo:
    """Return an item's decoder."""
    transforms = transforms_of(stored, key, registry)
    for descriptor, transform in zip(stored.chain, transforms, strict=True):
        if not hasattr(transform, "decode_block"):
            raise UnsupportedFormatError(
                f"{key!r} in {stored.file}: the transform {descriptor!r} is not a block transform"
            )
    return BlockUndo(cast("Sequence[BlockTransformExtension]", transforms))


def block_bytes(nbytes: int) -> int:
    """Return the block size in bytes: a power of two, so no element is split."""
    wanted = 1 << max(nbytes // _BLOCKS_PER_ITEM, 1).bit_length() - 1
    return min(max(wanted, _MIN_BLOCK_BYTES), _MAX_BLOCK_BYTES)
