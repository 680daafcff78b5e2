"""What is fuzzed: each target takes any bytes, and either accepts them or raises one of our own errors.

Checksums would stop nearly every input at the door, so targets that lie behind one are entered behind it.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dcp_base.errors import DcpError
from dcp_core.block_transforms import BlockUndo
from dcp_core.objects.object_bytes import load_object
from dcp_core.storage.item_decoder import locate_tensor
from dcp_core.transforms import ExtensionRegistry, undo
from dcp_format.checkpoints.checkpoint import stored_content
from dcp_format.safetensors.safetensors_header import build_header, read_header
from dcp_format.safetensors.safetensors_index import INDEX_NAME, open_safetensors
from dcp_io import LocalStore, Source
from dcp_io.archives.archive_checks import archive_problem, verify_zip, zip_records
from dcp_manifest import read_index
from dcp_manifest.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsafeCheckpointError,
    UnsupportedFormatError,
)
from dcp_manifest.file.blob import FOOTER_BYTES, Blob, Footer, index_crc32, read_footer
from dcp_manifest.file.index_problems import examine
from dcp_manifest.file.manifest_write import encode
from dcp_manifest.index.columns import Framing, StoredItem
from dcp_transforms import ZStandard
from dcp_transforms.block_zstd import BlockZStandard
from dcp_transforms.float_planes import FloatPlanes
from integration_tests.fuzz.calls import pickle_of

__all__ = ["TARGETS", "with_footer"]

_REFUSED = (CorruptCheckpointError, UnsafeCheckpointError, UnsupportedFormatError)
_MAX_BLOCK_BYTES = 1 << 20


def fuzz_footer(data: bytes) -> None:
    """The last 64 bytes, with and without a CRC that fits."""
    right = data[:56].ljust(56, b"\0")
    right += zlib.crc32(right).to_bytes(4, "little") + data[60:64].ljust(4, b"\0")
    for tail in (data[-FOOTER_BYTES:], right):
        with contextlib.suppress(*_REFUSED):
            read_footer(tail, size=len(tail) + int.from_bytes(data[16:24], "little"), file="f")


def with_footer(manifest: bytes, head: bytes = b"") -> bytes:
    """An index file around a manifest, all CRCs right as far as the manifest has a header."""
    try:
        blob = Blob(memoryview(manifest), file="f")
        index_crc = index_crc32(blob.data, blob.header)
    except CorruptCheckpointError:
        index_crc = 0
    footer = Footer(len(head), len(manifest), zlib.crc32(head), zlib.crc32(manifest), index_crc)
    return head + manifest + footer.to_bytes()


def fuzz_manifest(data: bytes) -> None:
    """A manifest whose CRCs are right: read, and written again if it is accepted."""
    file = with_footer(data)
    examine(file, file="f")
    try:
        index = read_index(file, file="f")
    except _REFUSED:
        return
    try:
        again = encode(index, interop=False)
    except UnsupportedFormatError:
        return
    assert encode(read_index(again, file="f"), interop=False) == again, "it does not come back as it was written"


def fuzz_index(data: bytes) -> None:
    """Any file in the place of the index: a pickle of stock's, or anything."""
    with contextlib.suppress(*_REFUSED):
        read_index(data, file="f")
    examine(data, file="f")


def fuzz_archive(data: bytes) -> None:
    """An archive of `torch.save`: its directory, its CRCs, where its values lie, what it holds."""
    verify_zip(data)
    archive_problem(data)
    with contextlib.suppress(CorruptCheckpointError):
        for record in zip_records(data):
            assert 0 <= record.start <= record.start + record.stored_bytes <= len(data), record
    item = StoredItem("f", 0, len(data), 0, len(data), Framing.TORCH_ZIP)
    found = locate_tensor(item, data[: 16 << 10], data[-(16 << 10) :])
    if found is not None:
        assert 0 <= found.item.offset <= found.item.offset + found.item.length <= len(data), found
    _load(data)


def fuzz_object(data: bytes) -> None:
    """The pickle of an object."""
    _load(_archived(data))


def fuzz_calls(data: bytes) -> None:
    """The pickle of an object that uses what is allowed, in any way: functions, classes, states, items."""
    _load(_archived(pickle_of(data)))


def _archived(pickled: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/version", "3\n")
        file.writestr("archive/byteorder", "little")
        file.writestr("archive/data/0", bytes(64))
    return buffer.getvalue()


def _load(data: bytes) -> None:
    with contextlib.suppress(*_REFUSED):
        load_object(data, key="k")


def fuzz_blocks(data: bytes) -> None:
    """An encoded block, whose CRC is right: of each transform, and of a chain."""
    size = int.from_bytes(data[:3], "little") % _MAX_BLOCK_BYTES
    into = bytearray(size)
    chains: Sequence[tuple[FloatPlanes | BlockZStandard, ...]] = (
        (FloatPlanes(),),
        (BlockZStandard(),),
        (BlockZStandard(), FloatPlanes()),
    )
    for chain in chains:
        # Whatever a transform raises becomes the error of the block.
        with contextlib.suppress(Exception):
            BlockUndo(chain).decode(memoryview(data)[3:], memoryview(into))


def fuzz_stream(data: bytes) -> None:
    """An item behind a transform of streams."""
    registry = ExtensionRegistry()
    registry.register(ZStandard)
    for framing in (Framing.RAW, Framing.OBJECT):
        item = StoredItem("f", 0, len(data), 0, len(data), framing, chain=("stream.zstd/1",))
        with contextlib.suppress(*_REFUSED):
            assert len(undo(memoryview(data), item, "k", registry, _MAX_BLOCK_BYTES)) <= _MAX_BLOCK_BYTES


class _Bytes(Source):
    """A file in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def size(self) -> int:
        return len(self._data)

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            assert 0 <= offset <= offset + len(buffer) <= len(self._data), "a read beyond the end"
            buffer[:] = self._data[offset : offset + len(buffer)]
            offset += len(buffer)

    def close(self) -> None:
        """Nothing is open."""


def fuzz_safetensors(data: bytes) -> None:
    """A safetensors file; whatever header is accepted can be built again."""
    try:
        header = read_header(_Bytes(data), file="f")
    except _REFUSED:
        return
    position = header.bytes
    for entry in header.entries:
        assert position == entry.start <= entry.stop <= len(data), entry
        position = entry.stop
    with contextlib.suppress(DcpError):
        build_header([(entry.name, entry.dtype, entry.shape) for entry in header.entries], header.metadata)


_SPLIT = b"\0INDEX\0"


def fuzz_folder(data: bytes) -> None:
    """A folder with one safetensors file, and an index of it behind a mark in the input."""
    file, found, index = data.partition(_SPLIT)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        Path(folder, "model.safetensors").write_bytes(file)
        if found:
            Path(folder, INDEX_NAME).write_bytes(index)
        with contextlib.suppress(*_REFUSED, CheckpointNotFoundError):
            stored_content(LocalStore(folder), open_safetensors(folder).index)


TARGETS: Mapping[str, Callable[[bytes], None]] = {
    name.removeprefix("fuzz_"): value for name, value in sorted(globals().items()) if name.startswith("fuzz_")
}
