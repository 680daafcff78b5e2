"""Transforms of stored bytes, such as compression or encryption: their contract, and how a reader decodes them.

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
    """A way to encode stored bytes; a reader finds it again by the descriptor that it leaves in the checkpoint."""

    @staticmethod
    @abstractmethod
    def registry_name() -> str:
        """Return the name under which a reader finds the extension: a descriptor without `/version`."""

    @staticmethod
    @abstractmethod
    def from_descriptor(version: str) -> Extension:
        """Return the extension that decodes a version. Raises ValueError if this class cannot decode it."""

    @abstractmethod
    def get_descriptor(self) -> str:
        """Return the descriptor, `name/version`, as the index stores it."""


class StreamTransformExtension(Extension):
    """A transform of a stream of bytes. One instance is used by several threads at once, each with its own streams."""

    @abstractmethod
    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        """Return a stream that writes its input, transformed, to `output`; the output is complete once it is closed."""

    @abstractmethod
    def transform_from(self, input: IO[bytes]) -> IO[bytes]:  # noqa: A002 - stock's name
        """Return a stream that decodes `input`: it yields the bytes that were written to `transform_to`."""


class ExtensionRegistry:
    """Registry of extensions by name: those registered here, then those of installed packages."""

    def __init__(self) -> None:
        self.extensions: dict[str, type[Extension]] = {}

    def register(self, cls: type[Extension]) -> None:
        """Add an extension, which replaces an earlier one of the same name."""
        self.extensions[cls.registry_name()] = cls

    def from_descriptor_list(self, descriptors: Sequence[str]) -> Sequence[Extension]:
        """Return the extension that decodes each descriptor, in the same order.

        Raises:
            UnsupportedFormatError: No package knows one of the descriptors, or its version; the message names the
                descriptor and what to install.
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
    """Decode an item's stored bytes: undo its chain of transforms.

    If the index has no CRC of the item (stock wrote it), a decoded archive is checked against its own CRCs.

    Args:
        data: Stored bytes of the item, verified as far as they have CRCs.
        stored: Record of the item; its chain lists the transforms in the order in which they are undone.
        key: FQN of the value, for error messages.
        registry: Registry of the transforms.
        limit_bytes: Largest valid size of the result.

    Raises:
        UnsupportedFormatError: A transform is not known, or is not a transform of streams.
        CorruptCheckpointError: The bytes cannot be decoded, become more than `limit_bytes`, or are an archive that does
            not match its CRCs.
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
    """Return the extensions that decode an item, one for each of its transforms.

    Raises:
        UnsupportedFormatError: A transform is not known; the message names the key and the file.
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
