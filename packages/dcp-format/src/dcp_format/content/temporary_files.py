"""Temporary files: names that identify the writing process, and removal of the files of killed processes.

Used for conversions and for saves to safetensors files; saves of checkpoints use markers instead (see `dcp_io`).
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
import zlib
from collections.abc import Callable
from dataclasses import replace

from dcp_core.errors import DcpError
from dcp_io import TEMPORARY_SUFFIX, LocalStore, ProcessIdentity, is_gone, this_process

__all__ = ["begins_as_written", "sweep", "temporary_name"]

_NAME = re.compile(r"\.(.+)\.w([0-9a-f]{8})-([0-9a-f]+)-([0-9a-f]+)-[0-9a-f]{8}" + re.escape(TEMPORARY_SUFFIX))
# Of processes that cannot be looked for from here: another host, or this one before it was started again.
_FORGOTTEN_SECONDS = 24 * 3600.0
_HEAD_BYTES = 512  # a sector: a loss of power takes all of it or nothing
_MAX_HEADER_BYTES = 100_000_000  # of safetensors, by the format


def temporary_name(name: str) -> str:
    """Return a new temporary name, with the identity of this process, for a file whose final name will be `name`."""
    me = this_process()
    owner = f"w{_where(me)}-{me.pid:x}-{me.start_ticks:x}-{secrets.token_hex(4)}"
    return f".{name}.{owner}{TEMPORARY_SUFFIX}"


def sweep(store: LocalStore, ours: Callable[[str], bool]) -> None:
    """Remove the temporary files that killed processes left in a folder.

    A file is removed if its process has certainly ended. If this is unknown, as for processes of other machines,
    the file is removed a day after the last write to it. Files whose names `temporary_name` did not make, and files
    that `begins_as_written` does not recognise, are kept.

    Args:
        store: Store of the folder.
        ours: Function (final name of a file) → whether the caller may replace the file of that name.
    """
    here = this_process()
    for entry in store.list():
        found = _NAME.fullmatch(entry.name)
        if found is None or not ours(found[1]):
            continue
        if found[2] == _where(here):
            dead = is_gone(replace(here, pid=int(found[3], 16), start_ticks=int(found[4], 16)))
        else:
            dead = abs(time.time() - entry.mtime) > _FORGOTTEN_SECONDS
        if dead and begins_as_written(store, entry.name, entry.bytes):
            with contextlib.suppress(OSError):  # another user's, which harms nothing
                store.delete(entry.name)


def begins_as_written(store: LocalStore, name: str, size: int) -> bool:
    """Whether a file begins like a zip archive or a safetensors file, or is empty or begins with zeros after a crash.

    Args:
        store: Store of the folder.
        name: Name of the file.
        size: Size of the file in bytes, from the listing of the folder.
    """
    head = memoryview(bytearray(min(size, _HEAD_BYTES)))
    try:
        store.read_into(name, 0, head)
    except (OSError, DcpError):  # gone, a link that leads out, or another user's
        return False
    data = bytes(head)
    is_safetensors = int.from_bytes(data[:8], "little") <= _MAX_HEADER_BYTES and data[8:9] in (b"{", b"")
    return not any(data) or data.startswith(b"PK\x03\x04"[:size]) or is_safetensors


def _where(process: ProcessIdentity) -> str:
    """Return a short digest of host, boot and pid namespace for a file's name."""
    return f"{zlib.crc32(repr((process.host, process.boot_id, process.pid_namespace)).encode()):08x}"
