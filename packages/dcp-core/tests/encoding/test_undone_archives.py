"""Archives that come out of transforms: damage is found by their own CRCs."""

from __future__ import annotations

import io
import zipfile
from typing import IO, Any

import pytest
import torch

from dcp_core.encoding.compression import ExtensionRegistry, StreamTransformExtension, undo
from dcp_core.errors import CorruptCheckpointError, UnsupportedFormatError
from dcp_io.archives.archive_checks import archive_problem
from dcp_manifest.index.columns import Framing, StoredItem


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


class Same(StreamTransformExtension):
    """A transform that changes nothing, and so notices nothing."""

    @staticmethod
    def registry_name() -> str:
        return "stream.same"

    @staticmethod
    def from_descriptor(version: str) -> Same:
        return Same()

    def get_descriptor(self) -> str:
        return "stream.same/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        return output

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:  # noqa: A002
        return input


def undone(data: bytes, framing: Framing, crc32: int | None = None) -> bytes:
    registry = ExtensionRegistry()
    registry.register(Same)
    item = StoredItem("f", 0, len(data), 0, len(data), framing, chain=("stream.same/1",), crc32=crc32)
    return bytes(undo(memoryview(data), item, "key", registry, 1 << 20))


def test_what_was_written_is_sound() -> None:
    for value in (torch.arange(9.0), {"step": 7}, [], torch.empty(0)):
        assert archive_problem(saved(value)) is None


def test_bytes_of_others_say_nothing() -> None:
    for data in (b"", b"PK", b"hello", bytes(100)):
        assert archive_problem(data) is None


@pytest.mark.parametrize("framing", [Framing.TORCH_ZIP, Framing.OBJECT])
def test_each_flipped_byte_of_a_record_is_found(framing: Framing) -> None:
    data = saved(torch.arange(3.0))
    assert undone(data, framing) == data
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        records = [(record.filename, archive.read(record)) for record in archive.infolist()]
    for _, content in records:
        at = data.index(content)
        for position in range(at, at + len(content)):
            damaged = bytearray(data)
            damaged[position] ^= 16
            with pytest.raises(CorruptCheckpointError, match=r"does not match its CRC.*'f'.*'key'"):
                undone(bytes(damaged), framing)


def test_what_the_index_vouches_for_is_not_checked_again() -> None:
    data = bytearray(saved(torch.arange(3.0)))
    data[data.index(b"cpu")] ^= 1
    assert undone(bytes(data), Framing.OBJECT, crc32=1) == bytes(data)


@pytest.mark.parametrize("length", [4, 40, 200, -1])
def test_an_archive_that_is_cut_is_found(length: int) -> None:
    assert "cannot be read" in str(archive_problem(saved(torch.arange(3.0))[:length]))


def test_no_more_is_inflated_than_there_is() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(64 << 20))
    assert "claim more bytes than the archive has" in str(archive_problem(buffer.getvalue()))


def test_an_archive_without_crcs_says_nothing() -> None:
    old = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        data = bytearray(saved(torch.arange(3.0)))
    finally:
        torch.serialization.set_crc32_options(old)
    data[data.index(b"cpu")] ^= 1
    assert archive_problem(data) is None


def test_a_transform_that_nobody_knows_is_named_with_key_and_file() -> None:
    item = StoredItem("f", 0, 3, 0, 3, Framing.RAW, chain=("stream.nobody/1",))
    with pytest.raises(UnsupportedFormatError, match=r"'key' in f .*'stream\.nobody'"):
        undo(memoryview(b"abc"), item, "key", ExtensionRegistry(), 10)
