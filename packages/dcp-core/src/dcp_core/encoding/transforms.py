"""Transforms of an item's bytes, such as compression or encryption: their contracts, registry and decoding.

Source: torch 2.13 `torch.distributed.checkpoint._extension` (names and meanings).
"""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import IO, cast

from dcp_core import plugins
from dcp_core.errors import CorruptCheckpointError, PluginNotFoundError, UnsupportedFormatError
from dcp_io.archives.archive_checks import archive_problem
from dcp_manifest.index.items import Framing, StoredItem

__all__ = ["Extension", "ExtensionRegistry", "StreamTransformExtension", "transforms_of", "undo"]

_STEP_BYTES = 1 << 20


class Extension(ABC):
    """Contract of a transform of stored bytes; a reader finds the transform by the descriptor in the index."""

    @staticmethod
    @abstractmethod
    def registry_name() -> str:
        """Return the name under which readers find the transform: its descriptor without `/version`."""

    @staticmethod
    @abstractmethod
    def from_descriptor(version: str) -> Extension:
        """Return the transform that decodes a version of the encoding. Raises ValueError for unknown versions."""

    @abstractmethod
    def get_descriptor(self) -> str:
        """Return the descriptor of the transform, `name/version`, which is stored in the index."""


class StreamTransformExtension(Extension):
    """Contract of a transform that encodes the bytes of a whole item as one stream.

    Several threads use one instance at the same time, each with streams of its own.
    """

    @abstractmethod
    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        """Return a writable stream that encodes its input and writes to `output`; closing the stream completes it."""

    @abstractmethod
    def transform_from(self, input: IO[bytes]) -> IO[bytes]:  # noqa: A002 - stock's name
        """Return a readable stream of the decoded bytes of `input`, which a `transform_to` stream has written."""


class ExtensionRegistry:
    """Registry of transforms by name: first those added with `register`, then those of installed plug-ins."""

    def __init__(self) -> None:
        self.extensions: dict[str, type[Extension]] = {}

    def register(self, cls: type[Extension]) -> None:
        """Add a transform class; it replaces an earlier one with the same `registry_name`."""
        self.extensions[cls.registry_name()] = cls

    def from_descriptor_list(self, descriptors: Sequence[str]) -> Sequence[Extension]:
        """Return a transform for each descriptor, in the same order.

        Raises:
            UnsupportedFormatError: No installed package supports one of the descriptors; the message names the
                descriptor and the package to install.
        """
        return [self._from(descriptor) for descriptor in descriptors]

    def _from(self, descriptor: str) -> Extension:
        name, _, version = descriptor.partition("/")
        try:
            found = self.extensions.get(name) or plugins.transform(descriptor)
        except PluginNotFoundError as error:
            raise UnsupportedFormatError(str(error)) from error
        try:
            return cast("type[Extension]", found).from_descriptor(version)
        except ValueError as error:
            raise UnsupportedFormatError(
                f"the transform {descriptor!r} is not known to {found.__qualname__}: {error}; install a version of its "
                "package that knows it"
            ) from error


def undo(data: memoryview, stored: StoredItem, key: str, registry: ExtensionRegistry, limit_bytes: int) -> memoryview:
    """Return an item's decoded bytes: decode the stored bytes by the item's chain of transforms.

    If the index has no CRC of the item, as after a save by stock, a decoded zip archive is checked by its own CRCs.

    Args:
        data: Stored bytes of the item; CRCs in the index have been checked.
        stored: Record of the item in the index, which lists the transforms in the order in which they decode.
        key: FQN of the tensor or object, for error messages.
        registry: Registry of the transforms.
        limit_bytes: Largest valid number of decoded bytes.

    Raises:
        UnsupportedFormatError: A transform is not installed, or is not a transform of streams.
        CorruptCheckpointError: The bytes cannot be decoded, the result is longer than `limit_bytes`, or it is a zip
            archive whose CRCs do not match.
    """
    stream = cast("IO[bytes]", io.BytesIO(data))
    for descriptor, extension in zip(stored.chain, transforms_of(stored, key, registry), strict=True):
        if not isinstance(extension, StreamTransformExtension) and not hasattr(extension, "transform_from"):
            raise UnsupportedFormatError(
                f"{key!r} in {stored.file}: the transform {descriptor!r} is not one of streams"
            )
        stream = cast("StreamTransformExtension", extension).transform_from(stream)
    try:
        decoded = _read_up_to(stream, limit_bytes)
    except Exception as error:
        raise _damage(stored, key, f"it cannot be decoded: {type(error).__name__}: {error}") from error
    if len(decoded) > limit_bytes:
        raise _damage(stored, key, f"it becomes more than {limit_bytes:,} bytes when it is decoded")
    if stored.crc32 is None and stored.framing is not Framing.RAW:
        problem = archive_problem(decoded)
        if problem is not None:
            raise _damage(stored, key, problem)
    return memoryview(decoded)


def transforms_of(stored: StoredItem, key: str, registry: ExtensionRegistry) -> Sequence[Extension]:
    """Return the transforms that decode an item, in the order in which they decode.

    Args:
        stored: Record of the item in the index.
        key: FQN of the tensor or object, for error messages.
        registry: Registry of the transforms.

    Raises:
        UnsupportedFormatError: A transform is not installed; the message names the key and the file.
    """
    try:
        return registry.from_descriptor_list(stored.chain)
    except UnsupportedFormatError as error:
        raise UnsupportedFormatError(f"{key!r} in {stored.file} cannot be decoded: {error}") from error


def _read_up_to(stream: IO[bytes], limit_bytes: int) -> bytearray:
    """Read all bytes of a stream, or a few more than the limit."""
    decoded = bytearray()
    while len(decoded) <= limit_bytes and (piece := stream.read(_STEP_BYTES)):
        decoded += piece
    return decoded


def _damage(stored: StoredItem, key: str, what: str) -> CorruptCheckpointError:
    names = ", ".join(map(repr, stored.chain))
    return CorruptCheckpointError(
        f"the data is stored through {names}, and {what}", file=stored.file, key=key, offset=stored.offset
    )
