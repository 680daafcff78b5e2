"""Footer of `.metadata`, its last 64 bytes: location of the manifest, and CRCs of head, manifest and footer.

The contents of the manifest are not parsed here.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from dcp_manifest.errors import CorruptCheckpointError, UnsupportedFormatError

__all__ = ["FLAG_STUB_HEAD", "FOOTER_BYTES", "MAJOR", "MINOR", "Footer", "read_footer"]

FOOTER_BYTES = 64
MAJOR = 1
MINOR = 0
FLAG_STUB_HEAD = 1
"""Footer flag: the head of the file is a stub, not stock's index; when stock loads it, it raises an error."""

_MAGIC = b"\x93DCPMAN\n"
_END_MAGIC = b"DCP\x93"
# The CRC of the footer covers all bytes before it. A new major version may change all but magics, version and this CRC.
_FIELDS = struct.Struct("<8sHHIQQIII12x")
_TAIL = struct.Struct("<I4s")
Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Footer:
    """Footer of a `.metadata` file; its fields are described in `docs/format.md`."""

    manifest_offset: int
    """Offset of the manifest in the file, bytes; equal to the length of the head."""
    manifest_bytes: int
    head_crc32: int
    manifest_crc32: int
    index_crc32: int
    """CRC32 of the manifest's length prefix, header and block CRCs; each block CRC verifies one block."""
    flags: int = 0
    major: int = MAJOR
    minor: int = MINOR

    def to_bytes(self) -> bytes:
        """Return the 64 bytes of the footer."""
        fields = _FIELDS.pack(
            _MAGIC,
            self.major,
            self.minor,
            self.flags,
            self.manifest_offset,
            self.manifest_bytes,
            self.head_crc32,
            self.manifest_crc32,
            self.index_crc32,
        )
        return fields + _TAIL.pack(zlib.crc32(fields), _END_MAGIC)


def read_footer(tail: Buffer, *, size: int, file: str) -> Footer | None:
    """Read the footer of a file, and verify it by its CRC and against the size of the file.

    Args:
        tail: The last 64 bytes of the file, or the whole file if it is shorter.
        size: Size of the file, bytes.
        file: Name of the file, for messages.

    Returns:
        The footer; None if the bytes do not begin like a footer.

    Raises:
        CorruptCheckpointError: The footer is damaged, or contradicts the size of the file.
        UnsupportedFormatError: A newer major version wrote the file.
    """
    if len(tail) < FOOTER_BYTES:
        return None
    crc, end_magic = _TAIL.unpack_from(tail, _FIELDS.size)
    magic, major, minor, flags, offset, length, head_crc, manifest_crc, index_crc = _FIELDS.unpack_from(tail)
    if magic != _MAGIC and end_magic != _END_MAGIC:
        return None
    where = size - FOOTER_BYTES
    if magic != _MAGIC or end_magic != _END_MAGIC or crc != zlib.crc32(tail[: _FIELDS.size]):
        raise CorruptCheckpointError("the footer is damaged; restore the file from a copy", file=file, offset=where)
    if major > MAJOR:
        raise UnsupportedFormatError(
            f"{file} was written in manifest format {major}.{minor}, and this version of dcp-manifest reads formats up "
            f"to {MAJOR}.x: install a newer dcp-manifest"
        )
    if offset + length != where:
        raise CorruptCheckpointError(
            f"the footer expects {offset + length + FOOTER_BYTES} bytes and the file has {size}: bytes are missing or "
            "were inserted",
            file=file,
        )
    return Footer(offset, length, head_crc, manifest_crc, index_crc, flags, major, minor)
