from __future__ import annotations

import io
import math
import struct
import subprocess
import sys
import warnings
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_io.archives import zip_format
from dcp_io.archives.archive_checks import verify_zip, zip_records
from dcp_io.archives.crc import crc32
from dcp_io.archives.zip_format import tensor_frame
from dcp_manifest.index.dtypes import ITEM_BYTES

torch = pytest.importorskip("torch", reason="torch is the oracle for what torch.load accepts")

QUANTIZED = {"qint8", "quint8", "qint32", "quint4x2", "quint2x4"}
DTYPES = sorted(name for name in ITEM_BYTES if name not in QUANTIZED)
SIZES = [(), (1,), (0,), (3, 0, 2), (2, 3), (2, 1, 3, 1), (300,), (1, 1, 1, 1, 70_000)]


def framed(dtype: str, sizes: tuple[int, ...], payload: bytes) -> bytes:
    frame = tensor_frame(dtype, sizes)
    assert frame.payload_bytes == len(payload)
    return frame.prefix + payload + frame.suffix(crc32(payload))


def pattern(dtype: str, sizes: tuple[int, ...]) -> bytes:
    count = math.prod(sizes) * ITEM_BYTES[dtype]
    return bytes(n % 2 for n in range(count)) if dtype == "bool" else bytes((n * 7 + 3) % 251 for n in range(count))


def load(data: bytes) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # complex32 and friends call themselves experimental
        return torch.load(io.BytesIO(data), weights_only=True)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.untyped_storage())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES[:5], ids=str)
def test_torch_loads_every_dtype(dtype, sizes):
    if f"torch.{dtype}" not in torch._weights_only_unpickler._get_allowed_globals():
        pytest.skip("this torch loads no such tensors, not its own either")
    payload = pattern(dtype, sizes)
    tensor = load(framed(dtype, sizes, payload))
    assert tensor.dtype == getattr(torch, dtype)
    assert tuple(tensor.shape) == sizes
    assert tensor.is_contiguous()
    assert not tensor.requires_grad
    assert raw_bytes(tensor) == payload


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["float32", "float8_e4m3fn"]), st.lists(st.integers(0, 9), max_size=6).map(tuple))
def test_any_shape_loads_with_the_strides_of_a_new_tensor(dtype, sizes):
    payload = pattern(dtype, sizes)
    tensor = load(framed(dtype, sizes, payload))
    assert tensor.stride() == torch.empty(sizes, dtype=getattr(torch, dtype)).stride()
    assert raw_bytes(tensor) == payload


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_other_readers_find_a_sound_archive(sizes, tmp_path):
    data = framed("int16", sizes, pattern("int16", sizes))
    archive = zipfile.ZipFile(io.BytesIO(data))
    assert archive.testzip() is None
    assert archive.namelist() == ["a/data.pkl", "a/version", "a/data/0"]
    assert archive.read("a/data/0") == pattern("int16", sizes)
    assert verify_zip(data) is True
    path = tmp_path / "item.pt"
    path.write_bytes(data)
    mapped = torch.load(path, mmap=True, weights_only=True)
    assert torch.equal(mapped, load(data))


def test_the_prefix_does_not_depend_on_the_values():
    frame = tensor_frame("float32", (2,))
    one, two = frame.suffix(1), frame.suffix(2)
    assert len(one) == len(two)
    assert one != two
    assert one.count((1).to_bytes(4, "little")) >= 2


def test_a_scalar_takes_at_most_600_bytes():
    assert max(len(framed(dtype, (), pattern(dtype, ()))) for dtype in DTYPES) <= 600


def test_frames_are_cached():
    assert tensor_frame("float32", (5, 5)) is tensor_frame("float32", (5, 5))


@pytest.mark.parametrize(
    ("dtype", "sizes", "message"),
    [("float33", (1,), "float33"), ("qint8", (1,), "qint8"), ("float32", (-1,), "negative")],
)
def test_what_cannot_be_framed_is_refused(dtype, sizes, message):
    with pytest.raises(ValueError, match=message):
        tensor_frame(dtype, sizes)


def test_a_name_that_would_smuggle_opcodes_is_refused():
    with pytest.raises(ValueError, match="cannot be framed"):
        tensor_frame("x\ncos\nsystem", (1,), 1)


@pytest.fixture
def small_zip64(monkeypatch):
    """As if an archive of more than 64 bytes needed 64-bit sizes."""
    monkeypatch.setattr(zip_format, "ZIP64_FROM_BYTES", 64)
    tensor_frame.cache_clear()
    yield
    tensor_frame.cache_clear()


def test_dtypes_newer_than_the_package_are_framed_as_bytes():
    payload = bytes(6)
    frame = tensor_frame("float96", (2,), 3)
    assert frame.payload_bytes == 6
    assert b"ctorch\nfloat96\n" in frame.prefix
    assert verify_zip(frame.prefix + payload + frame.suffix(crc32(payload))) is True


def test_wide_archives_open_everywhere(small_zip64, tmp_path):
    payload = pattern("float32", (40,))
    data = framed("float32", (40,), payload)
    assert b"PK\x06\x06" in data
    assert raw_bytes(load(data)) == payload
    assert zipfile.ZipFile(io.BytesIO(data)).testzip() is None
    assert verify_zip(data) is True
    path = tmp_path / "item.pt"
    path.write_bytes(data)
    assert torch.equal(torch.load(path, mmap=True, weights_only=True), load(data))


def test_sizes_beyond_4_gib_are_written_in_64_bits():
    size = 5 << 30
    frame = tensor_frame("uint8", (size,))
    suffix = frame.suffix(7)
    assert frame.payload_bytes == size
    assert struct.unpack_from("<4sIQQ", suffix) == (b"PK\x07\x08", 7, size, size)
    narrow = tensor_frame("uint8", (3 << 30,))
    assert struct.unpack_from("<4sIII", narrow.suffix(7)) == (b"PK\x07\x08", 7, 3 << 30, 3 << 30)


def test_a_sparse_file_beyond_4_gib_opens(tmp_path):
    size = (4 << 30) + 3
    frame = tensor_frame("uint8", (size,))
    path = tmp_path / "big.pt"
    with open(path, "wb") as file:
        file.write(frame.prefix)
        file.seek(len(frame.prefix) + size)
        file.write(frame.suffix(0))
    tensor = torch.load(path, mmap=True, weights_only=True)
    assert tensor.shape == (size,)
    assert int(tensor[-1]) == 0
    with zipfile.ZipFile(path) as archive:
        assert archive.getinfo("a/data/0").file_size == size


def test_the_package_needs_no_torch():
    code = "import dcp_io, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_zip_records_of_a_frame_point_at_the_payload():
    payload = pattern("int64", (4,))
    data = framed("int64", (4,), payload)
    record = zip_records(data)[-1]
    assert data[record.start : record.start + record.stored_bytes] == payload
