"""Recognition of files that saves made, by their names and first bytes: no other file is ever removed.

A marker, an index or a name may be forged. So a file is removed only if its name has the form of a save's files, and
the file is empty or begins like a save's file: data files begin with a mark that names their save, indexes as a
pickle, markers and notes as JSON.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from typing import Literal

from dcp_io.stores.store import TEMPORARY_SUFFIX, Store
from dcp_manifest.errors import DcpError
from dcp_manifest.folders.file_names import DATA_SUFFIX, is_index_name

__all__ = ["MARK_BYTES", "OwnName", "data_mark", "is_own_file", "own_name", "temporary_of"]

MARK_BYTES = 64
_MAGIC = b"\x93DCPDAT\n"
_ID = r"[A-Za-z0-9_-]{1,64}"
_DATA = re.compile(rf"[^/\x00]*?[0-9]+(?:\.({_ID}))?" + re.escape(DATA_SUFFIX))
_RANK_INDEX = re.compile(rf"__[0-9]{{1,9}}\.({_ID})\.metadata")
_MARKER = re.compile(rf"\.dcp-save-({_ID})(?:\.r[0-9]{{1,9}})?")
_NOTE = re.compile(
    r"\.dcp-(?:reading-[0-9a-f]{1,32}|removing|note\.json|note-next\.json|quarantined\.json|copies\.json|promoting(?:-[0-9a-f]{1,32})?\.json"
    r"|(?:promoted|forgone|refused)-[0-9a-f]{1,32}-[0-9a-f]{1,32}\.json)"
)
_TEMPORARY = re.compile(rf"\.(.+)\.((?:{_ID})?)\.[0-9a-f]{{1,32}}" + re.escape(TEMPORARY_SUFFIX))
_ARCHIVE, _ZSTD, _PICKLE, _JSON = b"PK\x03\x04", b"\x28\xb5\x2f\xfd", b"\x80", b"{"
# After a loss of power, the first sector of a file, or more, may never have reached the disk.
_HEAD_BYTES = 512


@dataclass(frozen=True, slots=True)
class OwnName:
    """Parsed name of a file that a save or the checkpoint manager made."""

    kind: Literal["data", "index", "note"]
    """Kind of the file; `note` stands for save markers, reader leases and other small JSON files."""
    save_id: str | None = None
    """Id of the save; None if the name does not contain it."""
    temporary: bool = False
    """Whether the name is that of a temporary file, which publishing renames to its final name."""


def data_mark(save_id: str) -> bytes:
    """Return the mark (magic bytes and save id) at the beginning of each data file of a save."""
    return (_MAGIC + save_id.encode())[:MARK_BYTES].ljust(MARK_BYTES, b"\0")


def own_name(name: str) -> OwnName | None:
    """Parse the name of a file; None if it is not the name of a save's file. Parent folders in it are ignored."""
    base = name.rpartition("/")[2]
    if temporary := temporary_of(base):
        becomes = own_name(temporary[0])
        return becomes and OwnName(becomes.kind, temporary[1] or None, temporary=True)
    if found := _DATA.fullmatch(base):
        return OwnName("data", found[1])
    if is_index_name(base):
        rank_index = _RANK_INDEX.fullmatch(base)
        return OwnName("index", rank_index[1] if rank_index else None)
    if found := _MARKER.fullmatch(base):
        return OwnName("note", found[1])
    return OwnName("note") if _NOTE.fullmatch(base) else None


def temporary_of(name: str) -> tuple[str, str] | None:
    """Parse the name of a temporary object of `Store.publish` into final name and tag; None for any other name."""
    found = _TEMPORARY.fullmatch(name)
    return (found[1], found[2]) if found else None


def is_own_file(store: Store, name: str, size: int) -> bool:
    """Whether a file's name and contents show that a save or the checkpoint manager made it.

    Also True for a save's file that a crash left empty, truncated, or with zeros as its first bytes.

    Args:
        store: The checkpoint's folder.
        name: Name of the file.
        size: Size of the file from the listing, bytes.

    Raises:
        CheckpointNotFoundError: The file no longer exists.
        OSError: The storage failed.
    """
    own = own_name(name)
    if own is None:
        return False
    head = memoryview(bytearray(min(size, _HEAD_BYTES)))
    try:
        with contextlib.closing(store.open(name)) as source:
            if head:
                source.read_into(0, [head])
    except DcpError as error:
        if isinstance(error, OSError):
            raise
        return False  # a link out of the folder, not a file, or shorter by now: not a leftover of a save
    return _begins_as(own, bytes(head))


def _begins_as(own: OwnName, head: bytes) -> bool:
    if not any(head):
        return True
    if own.kind != "data":
        return head.startswith(_PICKLE if own.kind == "index" else _JSON)
    if head.startswith(_MAGIC[: len(head)]):
        mark = data_mark(own.save_id) if own.save_id is not None else b""
        return bool(mark) and head[:MARK_BYTES] == mark[: len(head)]
    # Files without a mark (of other writers and of early versions) are recognised by their format.
    return head[:MARK_BYTES].lstrip(b"\0").startswith((_ARCHIVE, _ZSTD))
