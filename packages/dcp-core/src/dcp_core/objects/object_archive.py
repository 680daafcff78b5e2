"""Reader of `torch.save` archives: the pickle, the storages of its tensors, and the object that they form.

Source: torch 2.13 `torch.serialization._save` and `_load` (records of an archive, persistent ids).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dcp_io.archives.archive_checks import ZipRecord, inflated, refuse_bomb, zip_records
from dcp_io.archives.zip_format import LOCAL, local_lengths
from dcp_manifest.errors import CorruptCheckpointError
from dcp_manifest.pickles.pickle_table import Budget, PickleTable, UnsafePickleError
from dcp_manifest.pickles.safe_pickle import read_pickle
from dcp_manifest.pickles.unfolding import refuse_unfolding

__all__ = ["ObjectArchive", "read_archive"]

Data = bytes | memoryview
LoadStorage = Callable[["ObjectArchive", str, int], torch.UntypedStorage]


def read_archive(data: Data, table: PickleTable, load_storage: LoadStorage | None = None) -> Any:
    """Unpickle the object in a `torch.save` archive, with only the calls that a table allows.

    Args:
        data: Bytes of the archive. Other bytes may follow the archive if it contains only the pickle.
        table: Table of the calls that the pickle may make.
        load_storage: Function that is called with an `ObjectArchive`, the key of a tensor storage and its size in
            bytes, and returns this storage; None to copy the storages to CPU memory.

    Returns:
        The object; its tensors are on the CPU unless `load_storage` is given.

    Raises:
        UnsafePickleError: The pickle uses a global or call that is not allowed.
        Exception: The archive is damaged.
    """
    archive = ObjectArchive(data)
    pickled, start = archive.pickled()
    storages = _Storages(archive, load_storage or ObjectArchive.storage)
    value, _ = read_pickle(pickled, table, start=start, budget=Budget(len(data)), persistent=storages.load)
    refuse_unfolding(value, len(data))
    return value


class ObjectArchive:
    """Access to the records of a `torch.save` archive. The zip directory is read on first use.

    Args:
        data: Bytes of the archive.
    """

    def __init__(self, data: Data) -> None:
        self._data = data
        self._records: dict[str, ZipRecord] | None = None

    def pickled(self) -> tuple[bytes, int]:
        """Return bytes that contain the pickle record, and the offset of the pickle in these bytes."""
        data = self._data
        # torch.save puts it first; reading the archive's directory takes longer than the rest.
        if isinstance(data, bytes) and data[8:10] == b"\0\0":
            lengths = local_lengths(data[: LOCAL.size])
            if lengths is not None and data[LOCAL.size : LOCAL.size + lengths[0]].endswith(b"/data.pkl"):
                return data, LOCAL.size + sum(lengths)
        return bytes(self.record("data.pkl")), 0

    def record(self, name: str) -> Data:
        """Return the contents of a record, such as `data.pkl`; `name` does not include the archive's folder."""
        found = self._directory()[name]
        if found.deflated:
            return inflated(memoryview(self._data), found)
        return self._data[found.start : found.start + found.stored_bytes]

    def stored(self, key: str, nbytes: int) -> int:
        """Return the byte offset in the archive of an uncompressed tensor storage.

        Args:
            key: Key of the storage in the archive.
            nbytes: Number of bytes that the storage must have at least.

        Raises:
            ValueError: The storage is compressed.
            UnsafePickleError: The storage has fewer bytes.
        """
        found = self._directory()[f"data/{key}"]
        if found.deflated:
            raise ValueError("the values of a tensor are compressed")
        if nbytes > found.bytes:
            raise UnsafePickleError("a storage that is larger than its record is not allowed")
        return found.start

    def storage(self, key: str, nbytes: int) -> torch.UntypedStorage:
        """Return a copy, in CPU memory, of the first `nbytes` bytes of the tensor storage with this key.

        Raises:
            UnsafePickleError: The storage has fewer bytes.
        """
        values = self.record(f"data/{key}")
        if nbytes > len(values):
            raise UnsafePickleError("a storage that is larger than its record is not allowed")
        made = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        made.numpy()[:] = np.frombuffer(values, np.uint8, nbytes)
        return made.untyped_storage()

    def swapped(self) -> bool:
        """Return whether the archive was written on a machine with the opposite byte order."""
        records = self._directory()
        if "byteorder" in records:
            return bytes(self.record("byteorder")) != sys.byteorder.encode()
        said = torch.serialization.get_default_load_endianness()
        return (said.name.lower() if said else "little") not in ("native", sys.byteorder)

    def _directory(self) -> dict[str, ZipRecord]:
        if self._records is None:
            try:
                records = zip_records(self._data)
                refuse_bomb(records, len(self._data))
            except CorruptCheckpointError as error:  # that names neither file nor key: callers do
                raise ValueError(str(error)) from error
            root = next(record.name for record in records if record.name.endswith("/data.pkl"))[: -len("data.pkl")]
            self._records = {record.name.removeprefix(root): record for record in records}
        return self._records


class _Storages:
    """The storages of a pickle's persistent ids; each is loaded once."""

    def __init__(self, archive: ObjectArchive, load: LoadStorage) -> None:
        self._archive = archive
        self._load = load
        self._loaded: dict[str, tuple[int, torch.UntypedStorage]] = {}

    def load(self, pid: Any) -> torch.storage.TypedStorage | torch.UntypedStorage:
        """Return the storage for an id: ("storage", storage class, key, device, number of elements)."""
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
