"""Atomic creation of a file, which appears under its name only when it is complete and durable."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from dcp_base.schemes import file_path
from dcp_core.errors import DcpError
from dcp_io import CheckpointExistsError, LocalStore, Sink
from dcp_io.saves.save_files import ProcessIdentity, this_process
from dcp_io.stores.store import TEMPORARY_SUFFIX

# What file systems without hard links answer.
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EMLINK)


_NAME = re.compile(r"\.(.+)\.w([0-9a-f]{8})-([0-9a-f]+)-([0-9a-f]+)-[0-9a-f]{8}" + re.escape(TEMPORARY_SUFFIX))
# Of processes that cannot be looked for from here: another host, or this one before it was started again.
_STALE_AFTER_SECONDS = 24 * 3600.0
_HEAD_BYTES = 512  # a sector: a loss of power takes all of it or nothing
_MAX_HEADER_BYTES = 100_000_000  # of safetensors, by the format


def temporary_name(name: str) -> str:
    """Return a new temporary name, with the identity of this process, for a file `name`."""
    me = this_process()
    owner = f"w{_where(me)}-{me.pid:x}-{me.start_ticks:x}-{secrets.token_hex(4)}"
    return f".{name}.{owner}{TEMPORARY_SUFFIX}"


def sweep(store: LocalStore, ours: Callable[[str], bool]) -> None:
    """Remove the temporary files of killed processes from the folder of `store`.

    If it is unknown whether a process has ended, as on other machines, its file is removed a day after the last write.
    Files stay if `temporary_name` did not make their names, `begins_as_written` does not recognise them, or `ours` is
    False for their final names.
    """
    here = this_process()
    for entry in store.list():
        found = _NAME.fullmatch(entry.name)
        if found is None or not ours(found[1]):
            continue
        if found[2] == _where(here):
            dead = replace(here, pid=int(found[3], 16), start_ticks=int(found[4], 16)).is_gone()
        else:
            dead = abs(time.time() - entry.mtime) > _STALE_AFTER_SECONDS
        if dead and begins_as_written(store, entry.name, entry.bytes):
            with contextlib.suppress(OSError):  # another user's, which harms nothing
                store.delete(entry.name)


def begins_as_written(store: LocalStore, name: str, size: int) -> bool:
    """Whether a file begins like a zip archive or a safetensors file, or is empty or zeros after a crash."""
    head = memoryview(bytearray(min(size, _HEAD_BYTES)))
    try:
        with contextlib.closing(store.open(name)) as source:
            source.read_into(0, [head])
    except (OSError, DcpError):  # gone, a link that leads out, or another user's
        return False
    data = bytes(head)
    is_safetensors = int.from_bytes(data[:8], "little") <= _MAX_HEADER_BYTES and data[8:9] in (b"{", b"")
    return not any(data) or data.startswith(b"PK\x03\x04"[:size]) or is_safetensors


def _where(process: ProcessIdentity) -> str:
    return f"{zlib.crc32(repr((process.host, process.boot_id, process.pid_namespace)).encode()):08x}"


@contextlib.contextmanager
def new_file(path: str | os.PathLike[str], *, overwrite: bool) -> Iterator[Sink]:
    """Context manager that creates a file atomically: it appears at `path` after the block, and not after an error.

    Raises CheckpointExistsError if `path` exists at the beginning or at the end, and `overwrite` is False.
    """
    place = Path(file_path(path)).absolute()
    refuse_existing(place, overwrite=overwrite)
    store = LocalStore(place.parent)
    store.make()
    sweep(store, {place.name}.__contains__)
    temporary = temporary_name(place.name)
    with store.create(temporary) as sink:
        yield sink
        sink.close()
        give_name(place.parent / temporary, place, overwrite=overwrite)
    store.sync_folder()


def give_name(temporary: Path, place: Path, *, overwrite: bool) -> None:
    """Move a finished file to `place` atomically. Raises CheckpointExistsError like `new_file`."""
    if not overwrite:
        # Unlike a rename, a new link never replaces an existing file.
        try:
            os.link(temporary, place)
        except FileExistsError:
            refuse_existing(place, overwrite=False)
            raise
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            refuse_existing(place, overwrite=False)
        else:
            os.unlink(temporary)
            return
    os.replace(temporary, place)


def refuse_existing(path: Path, *, overwrite: bool) -> None:
    """Raise CheckpointExistsError if `path` exists and may not be replaced."""
    if not overwrite and os.path.lexists(path):
        raise CheckpointExistsError(f"{path} exists already; choose another place, or allow overwriting it")
