from __future__ import annotations

import io
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_io.archives.archive_checks import verify_zip, zip_records
from dcp_io.archives.zip_format import is_zip
from dcp_manifest.errors import CorruptCheckpointError

torch = pytest.importorskip("torch", reason="torch writes the archives that are checked")


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def zipped(method: int, content: bytes = b"abc" * 500) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        archive.writestr("x/one", content)
        archive.writestr("x/empty", b"")
    return buffer.getvalue()


TENSOR = saved(torch.arange(100))


@pytest.mark.parametrize(
    "data",
    [
        TENSOR,
        saved({"a": 1}),
        saved(torch.empty(0)),
        zipped(zipfile.ZIP_STORED),
        zipped(zipfile.ZIP_DEFLATED),
        zipped(zipfile.ZIP_DEFLATED, bytes(5 << 20)),
    ],
    ids=["tensor", "object", "empty", "stored", "deflated", "deflated zeros"],
)
def test_sound_archives(data):
    assert verify_zip(data) is True
    assert verify_zip(memoryview(bytearray(data))) is True
    expected = {info.filename: info.file_size for info in zipfile.ZipFile(io.BytesIO(data)).infolist()}
    assert {record.name: record.bytes for record in zip_records(data)} == expected


def test_archives_whose_writer_left_the_crcs_out():
    torch.serialization.set_crc32_options(False)
    try:
        data = saved(torch.arange(9))
    finally:
        torch.serialization.set_crc32_options(True)
    assert verify_zip(data) is None


@pytest.mark.parametrize("data", [b"", b"PK", b"not an archive", bytes(100)])
def test_what_is_no_archive_has_no_verdict(data):
    assert verify_zip(data) is None
    assert not is_zip(data)


@pytest.mark.parametrize("keep", [4, 100, len(TENSOR) - 30, len(TENSOR) - 1])
def test_truncated_archives_are_damaged(keep):
    assert verify_zip(TENSOR[:keep]) is False
    with pytest.raises(CorruptCheckpointError):
        zip_records(TENSOR[: keep - 1])


def data_ranges(data: bytes) -> list[int]:
    return [n for record in zip_records(data) for n in range(record.start, record.start + record.stored_bytes)]


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([TENSOR, zipped(zipfile.ZIP_STORED)]), st.data(), st.integers(0, 7))
def test_a_flipped_bit_of_any_data_is_found(data, draw, bit):
    place = draw.draw(st.sampled_from(data_ranges(data)))
    damaged = bytearray(data)
    damaged[place] ^= 1 << bit
    assert verify_zip(damaged) is False


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([TENSOR, zipped(zipfile.ZIP_DEFLATED)]), st.data(), st.integers(0, 255))
def test_damaged_headers_never_raise(data, draw, value):
    damaged = bytearray(data)
    for place in draw.draw(st.lists(st.integers(0, len(data) - 1), min_size=1, max_size=4)):
        damaged[place] = value
    assert verify_zip(damaged) in (True, False, None)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_behind_the_magic_is_damaged(tail):
    assert verify_zip(b"PK\x03\x04" + tail) is False
