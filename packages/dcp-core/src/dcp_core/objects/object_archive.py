"""A `torch.save` archive: its pickle, the storages of its tensors, and the value that they are read to.

Source: torch 2.13 `torch.serialization._save` and `_load` (records of an archive, persistent ids).
"""

from __future__ import annotations

import io
import struct
import sys
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dcp_core.objects.archive_crcs import refuse_bomb
from dcp_core.objects.unfolding import refuse_unfolding
from dcp_manifest.pickles.pickle_table import Budget, PickleTable, UnsafePickleError
from dcp_manifest.pickles.safe_pickle import read_pickle

__all__ = ["ObjectArchive", "read_archive"]

_LOCAL = struct.Struct("<4s22xHH")
Data = bytes | memoryview
LoadStorage = Callable[["ObjectArchive", str, int], torch.UntypedStorage]


def read_archive(data: Data, table: PickleTable, load_storage: LoadStorage | None = None) -> Any:
    """The value in an archive.

    Args:
        data: The archive; bytes may follow it only if it needs no directory.
        table: What its pickle may use.
        load_storage: Gives the storage of a key and a number of bytes; a copy on the CPU if None.

    Raises:
        UnsafePickleError: It uses something that is not allowed.
        Exception: It is damaged.
    """
    archive = ObjectArchive(data)
    pickled, start = archive.pickled()
    storages = _Storages(archive, load_storage or ObjectArchive.storage)
    value, _ = read_pickle(pickled, table, start=start, budget=Budget(len(data)), persistent=storages.load)
    refuse_unfolding(value, len(data))
    return value


class ObjectArchive:
    """The records of an archive. Its directory is only read when more than the pickle is needed."""

    def __init__(self, data: Data) -> None:
        self._data = data
        self._records: dict[str, zipfile.ZipInfo] | None = None

    def pickled(self) -> tuple[bytes, int]:
        """Bytes in which the pickle is, and where it begins. Copies nothing large of `bytes`."""
        data = self._data
        # torch.save puts it first; reading the archive's directory takes longer than the rest.
        if isinstance(data, bytes) and data[:4] == b"PK\3\4" and data[8:10] == b"\0\0":
            names, extra = (int.from_bytes(data[at : at + 2], "little") for at in (26, 28))
            if data[30 : 30 + names].endswith(b"/data.pkl"):
                return data, 30 + names + extra
        return bytes(self.record("data.pkl")), 0

    def record(self, name: str) -> Data:
        """The contents of a record; name without the archive's folder."""
        found = self._directory()[name]
        if found.compress_type == zipfile.ZIP_STORED:
            start = self.start(found)
            return self._data[start : start + found.file_size]
        with zipfile.ZipFile(_file_of(self._data)) as archive:
            return archive.read(found)

    def start(self, record: zipfile.ZipInfo) -> int:
        """Where the contents of a record begin."""
        at = record.header_offset
        magic, name_bytes, extra_bytes = _LOCAL.unpack(self._data[at : at + _LOCAL.size])
        start = at + _LOCAL.size + int(name_bytes) + int(extra_bytes)
        if magic != b"PK\3\4" or start + record.compress_size > len(self._data) or record.flag_bits & 1:
            raise zipfile.BadZipFile("a record's header is damaged")
        return start

    def stored(self, key: str, nbytes: int) -> int:
        """Where the values of a storage begin that has at least so many bytes and is not compressed."""
        found = self._directory()[f"data/{key}"]
        if found.compress_type != zipfile.ZIP_STORED or found.file_size != found.compress_size:
            raise zipfile.BadZipFile("the values of a tensor are compressed")
        if nbytes > found.file_size:
            raise UnsafePickleError("a storage that is larger than its record is not allowed")
        return self.start(found)

    def storage(self, key: str, nbytes: int) -> torch.UntypedStorage:
        """A copy of the values of a storage."""
        values = self.record(f"data/{key}")
        if nbytes > len(values):
            raise UnsafePickleError("a storage that is larger than its record is not allowed")
        made = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        made.numpy()[:] = np.frombuffer(values, np.uint8, nbytes)
        return made.untyped_storage()

    def swapped(self) -> bool:
        """Whether it was written on a machine of the other byte order."""
        records = self._directory()
        if "byteorder" in records:
            return bytes(self.record("byteorder")) != sys.byteorder.encode()
        said = torch.serialization.get_default_load_endianness()
        return (said.name.lower() if said else "little") not in ("native", sys.byteorder)

    def _directory(self) -> dict[str, zipfile.ZipInfo]:
        if self._records is None:
            with zipfile.ZipFile(_file_of(self._data)) as archive:
                refuse_bomb(archive, len(self._data))
                records = archive.infolist()
            root = next(record.filename for record in records if record.filename.endswith("/data.pkl"))[
                : -len("data.pkl")
            ]
            self._records = {record.filename.removeprefix(root): record for record in records}
        return self._records


class _Storages:
    """The storages that persistent ids of a pickle stand for; each is loaded once."""

    def __init__(self, archive: ObjectArchive, load: LoadStorage) -> None:
        self._archive = archive
        self._load = load
        self._loaded: dict[str, tuple[int, torch.UntypedStorage]] = {}

    def load(self, pid: Any) -> torch.storage.TypedStorage | torch.UntypedStorage:
        """The storage of an id ("storage", storage class, key, device, number of elements), of that class."""
        kind, storage_type, key, _, count = pid
        if kind != "storage" or type(key) is not str or type(count) is not int or not 0 <= count < 1 << 60:
            raise UnsafePickleError("a persistent id that is no storage is not allowed")
        dtype = torch.uint8 if storage_type is torch.UntypedStorage else storage_type.dtype
        if type(dtype) is not torch.dtype:
            raise UnsafePickleError("a persistent id without a dtype is not allowed")
        nbytes = count * dtype.itemsize
        if key not in self._loaded:
            storage = self._load(self._archive, key, nbytes) if nbytes else _untyped(0)
            if nbytes and self._archive.swapped():
                storage.byteswap(dtype)  # type: ignore[no-untyped-call]
            self._loaded[key] = nbytes, storage
        known, storage = self._loaded[key]
        if nbytes != known:
            raise UnsafePickleError("a storage of two sizes is not allowed")
        if storage_type is torch.UntypedStorage:
            return storage
        make: Callable[..., torch.storage.TypedStorage] = torch.storage.TypedStorage
        return make(wrap_storage=storage, dtype=dtype, _internal=True)


def _untyped(nbytes: int) -> torch.UntypedStorage:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu").untyped_storage()


def _file_of(data: Data) -> io.BufferedIOBase:
    return io.BytesIO(data) if isinstance(data, bytes) else io.BufferedReader(_View(data))


class _View(io.RawIOBase):
    """A file over memory, which it does not copy."""

    def __init__(self, view: memoryview) -> None:
        super().__init__()
        self._view, self._position = view, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = max(0, (0, self._position, len(self._view))[whence] + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        found = self._view[self._position : self._position + len(buffer)]
        buffer[: len(found)] = found
        self._position += len(found)
        return len(found)
