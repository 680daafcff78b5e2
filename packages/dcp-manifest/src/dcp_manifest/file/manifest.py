"""Encoding and decoding of the file `.metadata`: `[head][manifest][footer]`, from and to an index.

The head is for stock (see `stock_write`); this reader starts at the footer and ignores the head.
"""

from __future__ import annotations

import zlib
from functools import cached_property

from dcp_manifest.container.blob import WholeBlob, index_crc32
from dcp_manifest.container.footer import FLAG_STUB_HEAD, FOOTER_BYTES, Footer, read_footer
from dcp_manifest.errors import CorruptCheckpointError
from dcp_manifest.file.manifest_read import ManifestReader
from dcp_manifest.file.manifest_write import write_manifest
from dcp_manifest.index.columns import CheckpointIndex
from dcp_manifest.index.consistency import check_index
from dcp_manifest.index.relative_paths import check_relative_path
from dcp_manifest.stock.stock_read import read_stock
from dcp_manifest.stock.stock_write import MARKER_MODULE, stock_head, unreadable_reason
from dcp_manifest.stock.stub import is_stub, stub_head

__all__ = ["Buffer", "IndexFile", "decode", "encode", "read_index"]

_ALIGNMENT = 8
Buffer = bytes | bytearray | memoryview


def encode(index: CheckpointIndex, *, interop: bool = True, head: bytes | None = None) -> bytes:
    """Encode an index as the bytes of `.metadata`; `read_index` returns an equal index.

    Args:
        index: Index with `info`; its item columns are None if no data is stored yet.
        interop: Whether the head is an index that stock can load, provided that stock can read the data files.
        head: Bytes to use as the head, whatever `interop` is; None makes the head.

    Raises:
        InvalidIndexError: The index is inconsistent.
        UnsafeCheckpointError: A data file's name leads out of the checkpoint's folder.
    """
    manifest = write_manifest(index)
    flags = 0
    if head is None:
        reason = unreadable_reason(index) if interop else "it was saved with interop=False"
        head = stock_head(index) if reason is None else stub_head(reason)
        flags = 0 if reason is None else FLAG_STUB_HEAD
    # Aligned, so that readers can map the numbers in place. A pickle marks its own end, so padding may follow it.
    head += bytes(-len(head) % _ALIGNMENT)
    blob = WholeBlob(memoryview(manifest), file="the manifest to be written")
    footer = Footer(
        manifest_offset=len(head),
        manifest_bytes=len(manifest),
        head_crc32=zlib.crc32(head),
        manifest_crc32=zlib.crc32(manifest),
        index_crc32=index_crc32(blob.data, blob.header),
        flags=flags,
    )
    return b"".join((head, manifest, footer.to_bytes()))


def decode(data: Buffer, *, file: str) -> CheckpointIndex:
    """Decode the index from the manifest in `data`; every byte of manifest and footer is checked.

    Args:
        data: Bytes of the whole file.
        file: Name of the file, for messages.

    Raises:
        CorruptCheckpointError: There is no footer, or the manifest or the footer is damaged or inconsistent.
        UnsupportedFormatError: A newer major version wrote the file.
        UnsafeCheckpointError: A data file's name leads out of the checkpoint's folder.
    """
    found = IndexFile(data, file=file)
    if found.footer is None:
        raise CorruptCheckpointError("there is no manifest at the end of the file", file=file)
    return found.read()


def read_index(data: Buffer, *, file: str) -> CheckpointIndex:
    """Read an index file of any writer: from its manifest or, if stock wrote it, from its pickle. Runs no code from it.

    Args:
        data: Bytes of the whole file.
        file: Name of the file, for messages.

    Raises:
        CorruptCheckpointError: The bytes are damaged, or the manifest of a file that this project wrote is missing.
        UnsupportedFormatError: A newer major version wrote the file.
        UnsafeCheckpointError: The pickle has a class or call that does not belong in an index, or the name of a data
            file leads out of the checkpoint's folder.
    """
    return IndexFile(data, file=file).read()


class IndexFile:
    """The bytes of an index file, whose footer and manifest header are parsed once.

    Args:
        data: Bytes of the whole file, written by this project or by stock.
        file: Name of the file, for messages.

    Raises:
        CorruptCheckpointError: The footer is damaged.
        UnsupportedFormatError: A newer major version wrote the file.
    """

    def __init__(self, data: Buffer, *, file: str) -> None:
        self.file = file
        self.view = memoryview(data)
        self.footer = footer = read_footer(self.view[-FOOTER_BYTES:], size=len(self.view), file=file)
        self._manifest = self.view[footer.manifest_offset : -FOOTER_BYTES] if footer else memoryview(b"")

    @cached_property
    def blob(self) -> WholeBlob:
        """The manifest as a blob; only its header has been checked."""
        return WholeBlob(self._manifest, file=self.file)

    def read(self) -> CheckpointIndex:
        """Return the index, from the manifest or else from stock's pickle. Errors: see `read_index`."""
        return self._read_pickle() if self.footer is None else self._read_manifest(self.footer)

    def _read_manifest(self, footer: Footer) -> CheckpointIndex:
        if zlib.crc32(self._manifest) != footer.manifest_crc32:
            raise CorruptCheckpointError(
                "the manifest is damaged; restore the file from a copy", file=self.file, offset=footer.manifest_offset
            )
        try:
            index = ManifestReader(self.blob).whole()
            check_index(index)
        except (ValueError, TypeError, IndexError) as error:
            if isinstance(error, CorruptCheckpointError):
                raise
            raise CorruptCheckpointError(f"the manifest is inconsistent: {error}", file=self.file) from error
        for path in index.files:
            check_relative_path(path, file=self.file)
        return index

    def _read_pickle(self) -> CheckpointIndex:
        if is_stub(self.view):
            raise CorruptCheckpointError("the file has lost its manifest; restore it from a copy", file=self.file)
        index, end, modules = read_stock(self.view, file=self.file)
        if MARKER_MODULE in modules or end != len(self.view):
            raise CorruptCheckpointError(
                "the index is followed by bytes that are not a valid manifest, or has lost its manifest, and is not "
                "read without it: restore the file from a copy",
                file=self.file,
                offset=end,
            )
        return index
