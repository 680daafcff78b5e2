"""`dcp_to_torch_save` and `torch_save_to_dcp`: bit for bit both ways, safe, bounded, and clear about what is wrong."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_core import (
    ByteStorageWriter,
    CheckpointException,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsafeCheckpointError,
    UnsupportedFormatError,
    load,
    load_keys,
    save,
)
from dcp_core.errors import UnsupportedValueError
from dcp_format import BroadcastingTorchSaveReader, DynamicMetaLoadPlanner, dcp_to_torch_save, torch_save_to_dcp
from dcp_format.conversion import open_content
from dcp_io import LocalStore, StoreBackend, verify_checkpoint
from dcp_io.archives.archive_checks import verify_zip, zip_records
from dcp_manifest import index_of
from integration_tests.kits.damage import flip

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.complex64, torch.complex128),
]


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    high = 2 if dtype is torch.bool else 256
    return torch.randint(0, high, (size,), dtype=torch.uint8).view(dtype).view(shape)


def state() -> dict[str, Any]:
    tied = torch.randn(40, 8)
    return {
        "model": {str(dtype): random_tensor((7, 5), dtype) for dtype in DTYPES},
        "large": torch.randn(1500, 1000),
        "tied": [tied, tied],
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "rows": {5: torch.arange(3)},
        "nothing": {},
        "step": 7,
        "betas": (0.9, 0.95),
        "inside": (torch.arange(4), "text"),
    }


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert bits(one) == bits(other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert type(one) is type(other)
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
    else:
        assert one == other


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("layout", ["torch", "raw"])
def test_checkpoint_becomes_a_file_that_torch_opens(tmp_path: Path, layout: Any, mmap: bool) -> None:
    value = state()

    class Writer(ByteStorageWriter):
        def _open(self, checkpoint_id: Any) -> StoreBackend:
            return StoreBackend(LocalStore(checkpoint_id), layout=layout)

        @classmethod
        def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
            return True

    save(value, storage_writer=Writer(tmp_path / "c"))
    dcp_to_torch_save(tmp_path / "c", tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=True, mmap=mmap)
    assert_same(value, loaded)
    assert loaded["tied"][0].data_ptr() == loaded["tied"][1].data_ptr()
    assert verify_zip((tmp_path / "model.pt").read_bytes())
    with zipfile.ZipFile(tmp_path / "model.pt") as archive:
        assert archive.testzip() is None


def test_file_becomes_a_checkpoint_and_a_file_again(tmp_path: Path) -> None:
    value = state()
    torch.save(value, tmp_path / "a.pt")
    torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "c")
    assert verify_checkpoint(tmp_path / "c").ok
    assert_same(value, load_keys(checkpoint_id=tmp_path / "c"))
    assert index_of(tmp_path / "c").alias_names == ["tied.1"]
    dcp_to_torch_save(tmp_path / "c", tmp_path / "b.pt")
    assert_same(value, torch.load(tmp_path / "b.pt", weights_only=True))


def test_tensors_of_any_strides(tmp_path: Path) -> None:
    base = torch.arange(600.0).view(20, 30)
    value = {
        "columns": base[:, 3:7],
        "transposed": base.t(),
        "expanded": torch.ones(1, 5).expand(4, 5),
        "row": base[3],
        "conj": torch.complex(base, base).conj(),
        "parameter": torch.nn.Parameter(base.clone()),
    }
    torch.save(value, tmp_path / "a.pt")
    torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "c")
    loaded = load_keys(checkpoint_id=tmp_path / "c")
    assert all(torch.equal(value[name], loaded[name]) for name in value)


def test_views_that_differ_in_a_bit_of_their_form_are_not_one(tmp_path: Path) -> None:
    value = torch.randn(4, dtype=torch.complex64)
    states = {"conj": {"a": value, "b": value.conj()}, "neg": {"a": value.imag, "b": value.conj().imag}}
    for name, state in states.items():
        torch.save(state, tmp_path / f"{name}.pt")
        torch_save_to_dcp(tmp_path / f"{name}.pt", tmp_path / name)
        loaded = load_keys(checkpoint_id=tmp_path / name)
        assert all(torch.equal(loaded[key], state[key]) for key in state), name


def rewritten(source: Path, path: Path, *, deflate: Callable[[str], bool], order: bytes | None = None) -> None:
    """The archive as another program packs it."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            data = order if order is not None and name.endswith("/byteorder") else old.read(name)
            new.writestr(name, data, zipfile.ZIP_DEFLATED if deflate(name) else zipfile.ZIP_STORED)


@pytest.mark.parametrize("elements", [4, 1000, 1_000_000])  # of the last, more bytes than the compressed file has
def test_files_that_an_archiver_compressed_are_refused(tmp_path: Path, elements: int) -> None:
    torch.save({"w": torch.zeros(elements), "v": torch.arange(float(elements))}, tmp_path / "a.pt")
    rewritten(tmp_path / "a.pt", tmp_path / "b.pt", deflate=lambda name: True)
    with pytest.raises(UnsupportedFormatError, match=r"b\.pt was compressed by an archiver"):
        open_content(tmp_path / "b.pt")
    template = {"w": torch.zeros(elements)}
    reader = BroadcastingTorchSaveReader(tmp_path / "b.pt")
    with pytest.raises(CheckpointException, match="compressed by an archiver"):
        load(template, storage_reader=reader, planner=DynamicMetaLoadPlanner(), no_dist=True)


def test_a_compressed_pickle_harms_nothing(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(300.0)}, tmp_path / "a.pt")
    rewritten(tmp_path / "a.pt", tmp_path / "b.pt", deflate=lambda name: name.endswith("data.pkl"))
    torch_save_to_dcp(tmp_path / "b.pt", tmp_path / "c")
    assert torch.equal(load_keys(checkpoint_id=tmp_path / "c")["w"], torch.arange(300.0))


def test_files_of_the_other_byte_order_are_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(300.0)}, tmp_path / "a.pt")
    rewritten(tmp_path / "a.pt", tmp_path / "b.pt", deflate=lambda name: False, order=b"big")
    with pytest.raises(UnsupportedFormatError, match=r"b\.pt was written with the other byte order"):
        open_content(tmp_path / "b.pt")


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"missing\.pt"):
        torch_save_to_dcp(tmp_path / "missing.pt", tmp_path / "c")
    (tmp_path / "text.pt").write_text("no archive")
    with pytest.raises(CorruptCheckpointError, match=r"text\.pt"):
        torch_save_to_dcp(tmp_path / "text.pt", tmp_path / "c")
    torch.save(torch.ones(3), tmp_path / "bare.pt")
    with pytest.raises(UnsupportedValueError, match="not a state dict"):
        torch_save_to_dcp(tmp_path / "bare.pt", tmp_path / "c")
    torch.save({"w": torch.ones(30_000)}, tmp_path / "cut.pt")
    os.truncate(tmp_path / "cut.pt", 60_000)
    with pytest.raises(CorruptCheckpointError, match=r"cut\.pt"):
        torch_save_to_dcp(tmp_path / "cut.pt", tmp_path / "c")
    assert not (tmp_path / "c" / ".metadata").exists()


class Hostile:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch ran",)


def test_nothing_of_a_file_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(3), "bad": Hostile()}, "a.pt")
    with pytest.raises(UnsafeCheckpointError, match=r"posix\.system"):
        torch_save_to_dcp("a.pt", "c")
    assert not Path("ran").exists()


@pytest.mark.parametrize("elements", [30_000, 3_000_000])
def test_a_flipped_bit_is_found(tmp_path: Path, elements: int) -> None:
    torch.save({"w": torch.arange(elements)}, tmp_path / "a.pt")
    flip(tmp_path / "a.pt", mask=4)
    with pytest.raises(CorruptCheckpointError, match="'w'"):
        torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "c")
    assert not (tmp_path / "c" / ".metadata").exists()


def file_with(path: Path, value: Any) -> dict[str, tuple[int, int]]:
    """Where the records of a new file lie: name → first byte and length."""
    torch.save(value, path)
    return {record.name.partition("/")[2]: (record.start, record.bytes) for record in zip_records(path.read_bytes())}


@pytest.mark.parametrize(
    ("value", "record"),
    [
        (lambda: torch.arange(12.0), "data.pkl"),
        (lambda: torch.arange(12.0), "data/0"),
        (lambda: torch.arange(12.0).view(3, 4).t(), "data/0"),
        (lambda: torch.arange(12.0)[3:7], "data/0"),
        (lambda: torch.quantize_per_tensor(torch.arange(12.0), 0.5, 3, torch.qint8), "data/0"),
    ],
    ids=["pickle", "whole", "strided", "part", "quantized"],
)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_no_byte_of_a_value_is_taken_unchecked(tmp_path: Path, value: Callable[[], Any], record: str) -> None:
    path = tmp_path / "state.pt"
    start, size = file_with(path, {"t": value(), "step": 7})[record]
    for position in (start, start + size // 2, start + size - 1):
        data = bytearray(path.read_bytes())
        data[position] ^= 2
        damaged = tmp_path / "damaged.pt"
        damaged.write_bytes(data)
        with pytest.raises(CorruptCheckpointError, match="damaged"):
            torch_save_to_dcp(damaged, tmp_path / "checkpoint")
        assert not (tmp_path / "checkpoint" / ".metadata").exists()


def test_a_reader_that_broadcasts_checks_every_record(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    start, _ = file_with(path, {"t": torch.arange(12.0)})["data/0"]
    flip(path, start + 5, 2)
    template = {"t": torch.zeros(12)}
    with pytest.raises(CheckpointException, match="does not match its CRC"):
        load(template, storage_reader=BroadcastingTorchSaveReader(path), planner=DynamicMetaLoadPlanner(), no_dist=True)
    assert not template["t"].any()


def test_files_without_crcs_are_read(tmp_path: Path) -> None:
    path, old = tmp_path / "state.pt", torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"t": torch.arange(12.0)}, path)
    finally:
        torch.serialization.set_crc32_options(old)
    torch_save_to_dcp(path, tmp_path / "checkpoint")
    assert verify_checkpoint(tmp_path / "checkpoint").ok


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "state.pt")
    with pytest.raises(CorruptCheckpointError, match=r"no torch\.save archive"):
        torch_save_to_dcp(tmp_path / "state.pt", tmp_path / "checkpoint")


def test_a_damaged_checkpoint_leaves_the_old_file(tmp_path: Path) -> None:
    save({"w": torch.arange(300_000)}, checkpoint_id=tmp_path / "c")
    dcp_to_torch_save(tmp_path / "c", tmp_path / "a.pt")
    before = (tmp_path / "a.pt").read_bytes()
    (data,) = (tmp_path / "c").glob("*.distcp")
    flip(data)
    with pytest.raises(CorruptCheckpointError, match="'w'"):
        dcp_to_torch_save(tmp_path / "c", tmp_path / "a.pt")
    assert (tmp_path / "a.pt").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "c"]


def test_nothing_is_read_before_it_is_asked_for(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(300_000)}, tmp_path / "a.pt")
    content = open_content(tmp_path / "a.pt")
    pieces = content.tensors["w"].data.pieces(1 << 20)
    assert 0 < len(next(pieces)) <= 1 << 20
    content.close()
