"""Records of a mapped `torch.save` file, each checked against its CRC once, on first use.

The read engine checks records that it reads whole; this module checks the other records.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch

from dcp_core.errors import CorruptCheckpointError, UnsupportedFormatError
from dcp_io import ZipRecord, record_crc32, zip_records

__all__ = ["ArchiveRecords"]

# Within the archive's folder; the values of each storage are one record.
_VALUES = "/data/"


class ArchiveRecords:
    """Records of an archive: their byte ranges, and which records have been checked against their CRC.

    Args:
        mapped: Memory map of the whole file.
        file: Name of the file, for error messages.

    Raises:
        CorruptCheckpointError: The archive's directory is damaged.
        UnsupportedFormatError: Tensors are compressed in the file.
    """

    def __init__(self, mapped: torch.UntypedStorage, *, file: str) -> None:
        empty = torch.tensor([], dtype=torch.uint8, device="cpu")
        self.view = memoryview(empty.set_(mapped).numpy())  # type: ignore[arg-type]
        """The whole file, mapped."""
        self._file = file
        self.address = mapped.data_ptr()
        """Address of the first byte, in this process."""
        self.nbytes = mapped.nbytes()
        """Size of the file in bytes."""
        try:
            records = zip_records(self.view)
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"the file cannot be read: {error}", file=file) from error
        # Before their sizes are looked at: a record that compresses well is longer than the file without any damage.
        if any(record.deflated and _VALUES in record.name for record in records):
            raise UnsupportedFormatError(f"{file} was compressed by an archiver; torch.load and torch.save it again")
        if sum(record.bytes for record in records) > self.nbytes:
            raise CorruptCheckpointError("its records claim more bytes than the file has", file=file)
        # A writer may leave CRCs out: nothing can be checked then.
        known = any(record.crc32 for record in records if record.bytes)
        self._unchecked = [record for record in records if record.bytes] if known else []
        self.crcs = {
            (record.start, record.stored_bytes): record.crc32 for record in self._unchecked if not record.deflated
        }
        """Start and length of each uncompressed record → its CRC."""

    def check_small(self) -> None:
        """Check the CRCs of all records except tensor storages. Raises CorruptCheckpointError for a damaged record."""
        self._check(record for record in self._unchecked if _VALUES not in record.name)

    def check_range(self, start: int, nbytes: int) -> None:
        """Check the CRCs of records that overlap `nbytes` bytes from `start` on. Raises CorruptCheckpointError."""
        stop = start + nbytes
        self._check(
            record for record in self._unchecked if record.start < stop and start < record.start + record.stored_bytes
        )

    def check_all(self) -> None:
        """Check the CRC of every record not checked yet. Raises CorruptCheckpointError for a damaged record."""
        self._check(self._unchecked)

    def _check(self, records: Iterable[ZipRecord]) -> None:
        for record in [*records]:
            try:
                value = record_crc32(self.view, record)
            except zlib.error:
                value = None
            if value != record.crc32:
                raise CorruptCheckpointError(
                    f"the record {record.name!r} does not match its CRC: the file is damaged; restore it from a copy",
                    file=self._file,
                    offset=record.start,
                )
            self._unchecked.remove(record)
