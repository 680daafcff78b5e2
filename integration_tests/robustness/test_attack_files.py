"""Files as an attacker would make them, for every reader: refused, by an error that says why, and in little memory.

In the manner of safetensors' `attacks/`: zip tricks, decompression bombs, headers that lie. Pickles that run code are
in `test_hostile_pickles`, indexes that lie and paths that lead out in `test_hostile_places`.
"""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import zstandard

import dcp_all as dcp
import dcp_format
from dcp_core.errors import CorruptCheckpointError, DcpError, UnsafeCheckpointError, UnsupportedFormatError
from dcp_manifest.file.manifest_write import encode
from integration_tests.robustness.crafted import (
    METADATA,
    little_memory,
    ours_with_object,
    saved,
    stock_checkpoint,
)

TENSOR = torch.arange(6.0)
HUGE = 1 << 40
MANY = 48 << 20
REFUSALS = (CorruptCheckpointError, UnsafeCheckpointError)


def zipped(records: Mapping[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, data in records.items():
            archive.writestr(f"archive/{name}", data)
    return buffer.getvalue()


def records_of(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def inflated(data: bytes) -> bytes:
    """The archive with a record of many zeros that take few bytes."""
    return zipped({**records_of(data), "data/9": bytes(MANY)}, zipfile.ZIP_DEFLATED)


def deflated_pickle(data: bytes) -> bytes:
    records = records_of(data)
    return zipped({**records, "data.pkl": records["data.pkl"] + bytes(MANY)}, zipfile.ZIP_DEFLATED)


def overlapping(data: bytes) -> bytes:
    """Each entry of the directory many times: records that share their bytes."""
    data = zipped({**records_of(data), "data/9": bytes(1 << 20)})
    at, size, entries, _ = directory_of(data)
    again = data[at : at + size] * 60
    return data[:at] + again + end_record(entries * 60, len(again), at)


def directory_of(data: bytes) -> tuple[int, int, int, int]:
    position = data.rfind(b"PK\5\6")
    entries, size, at = struct.unpack_from("<HII", data, position + 10)
    return at, size, entries, position


def end_record(entries: int, size: int, at: int) -> bytes:
    return struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, entries, entries, size, at, 0)


def entry_with(data: bytes, offset: int, value: int, width: int = 4) -> bytes:
    """Another number in the first entry of the directory."""
    at, *_ = directory_of(data)
    changed = bytearray(data)
    changed[at + offset : at + offset + width] = value.to_bytes(width, "little")
    return bytes(changed)


def directory_beyond(data: bytes) -> bytes:
    _, size, entries, position = directory_of(data)
    return data[:position] + end_record(entries, size, 1 << 31)


def only_a_directory(data: bytes) -> bytes:
    return end_record(65535, 0xFFFFFFFF, 0xFFFFFFFF)


def encrypted(data: bytes) -> bytes:
    return entry_with(data, 8, 1, 2)


def names_that_lead_out(data: bytes) -> bytes:
    return zipped({f"../../{name}": record for name, record in records_of(data).items()})


# Name → what is done to an archive that torch.save wrote.
ZIPS: dict[str, Callable[[bytes], bytes]] = {
    "inflated": inflated,
    "deflated pickle": deflated_pickle,
    "overlapping": overlapping,
    "encrypted": encrypted,
    "unknown method": lambda data: entry_with(data, 10, 99, 2),
    "huge record": lambda data: entry_with(data, 24, 0xFFFFFFF0),
    "huge stored size": lambda data: entry_with(data, 20, 0xFFFFFFF0),
    "header beyond": lambda data: entry_with(data, 42, 0x7FFFFFFF),
    "directory beyond": directory_beyond,
    "only a directory": only_a_directory,
    "names that lead out": names_that_lead_out,
    "no records": lambda data: zipped({}),
    "only a pickle": lambda data: zipped({"data.pkl": records_of(data)["data.pkl"]}),
    "twice the beginning": lambda data: data[:200] + data,
}


def load(folder: Path) -> dict[str, Any]:
    template: dict[str, Any] = {"t": torch.zeros(6), "o": None}
    dcp.load(template, storage_reader=dcp.FileSystemReader(folder, thread_count=1), no_dist=True)
    return template


OBJECT = {"inside": torch.arange(4.0), "step": 7}


@pytest.mark.parametrize("name", ZIPS)
@pytest.mark.parametrize("place", ["tensor", "object", "ours"])
def test_zip_tricks(tmp_path: Path, name: str, place: str) -> None:
    """An archive that becomes the value all the same is harmless; nothing else comes of one."""
    folder = tmp_path / "root" / "checkpoint"
    if place == "ours":  # every CRC of the index is right
        ours_with_object(folder, ZIPS[name](saved(OBJECT)))
    else:
        tensor = saved(TENSOR) if place == "object" else ZIPS[name](saved(TENSOR))
        stock_checkpoint(folder, tensor, ZIPS[name](saved(OBJECT)) if place == "object" else saved(OBJECT))
    with little_memory(256 << 20):
        try:
            found = load(folder)
        except REFUSALS as error:
            assert ".distcp" in str(error)
            assert len(str(error)) < 4000
        else:
            assert name not in BOMBS
            assert torch.equal(found["t"], TENSOR)
            assert torch.equal(found["o"]["inside"], OBJECT["inside"])
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} <= {
        METADATA, *(path.name for path in folder.iterdir())
    }  # fmt: skip


BOMBS = ("inflated", "deflated pickle", "overlapping")


@pytest.mark.parametrize("name", ZIPS)
def test_zip_tricks_of_a_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / "state.pt"
    path.write_bytes(ZIPS[name](saved({"t": TENSOR, "o": OBJECT})))
    with little_memory(256 << 20):
        try:
            dcp_format.torch_save_to_dcp(path, tmp_path / "checkpoint")
        except (*REFUSALS, UnsupportedFormatError) as error:
            assert "state.pt" in str(error)
            assert not (tmp_path / "checkpoint" / METADATA).exists()
        else:
            assert name not in BOMBS
            assert torch.equal(dcp.load_keys(checkpoint_id=tmp_path / "checkpoint", no_dist=True)["t"], TENSOR)


@pytest.mark.parametrize("content_size", [True, False])
def test_a_stream_that_becomes_too_much(tmp_path: Path, content_size: bool) -> None:
    """A few kilobytes of Zstandard that are a gigabyte of zeros, in the place of six numbers."""
    compressor = zstandard.ZstdCompressor(write_content_size=content_size)
    bomb = compressor.compress(bytes(MANY))
    folder = tmp_path / "checkpoint"
    stock_checkpoint(folder, bomb, saved(1))
    _through_zstd(folder)
    with little_memory(256 << 20), pytest.raises(CorruptCheckpointError, match="decodes to more than") as found:
        load(folder)
    assert (found.value.key, found.value.file) == ("t", "data.distcp")


def _through_zstd(folder: Path) -> None:
    """Write stock's index anew as ours, saying that the tensor went through Zstandard."""
    from dataclasses import replace

    import numpy as np

    from dcp_manifest import read_index
    from dcp_manifest.index.columns import ManifestInfo

    index = read_index((folder / METADATA).read_bytes(), file=METADATA)
    assert index.chunk_items is not None
    items = replace(index.chunk_items, chain=np.ones(1, np.uint8))
    info = ManifestInfo(save_id="abc", world_size=1, writer="attacker/1", generation=1, created_ns=0)
    changed = replace(index, chunk_items=items, chains=(("stream.zstd/1",),), info=info)
    (folder / METADATA).write_bytes(encode(changed))


def header(table: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def f32(shape: Any = (2,), offsets: Any = (0, 8), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


SAFETENSORS: dict[str, bytes] = {
    "empty file": b"",
    "no header": b"\0" * 8,
    "huge header": header({}, length=HUGE),
    "header of all bytes": header({}, length=(1 << 64) - 1),
    "no JSON": header(b"\xff" * 40),
    "deep JSON": header(b"[" * 100_000),
    "deep object": header(b'{"a":' * 100_000),
    "a list": header([1, 2]),
    "twice one name": header(json.dumps({"a": f32(), "b": f32()}).replace('"b"', '"a"').encode(), bytes(8)),
    "overlap": header({"a": f32(), "b": f32(offsets=(4, 12))}, bytes(12)),
    "same bytes twice": header({"a": f32(), "b": f32()}, bytes(8)),
    "hole": header({"a": f32(), "b": f32(offsets=(16, 24))}, bytes(24)),
    "bytes behind": header({"a": f32()}, bytes(64)),
    "beyond the end": header({"a": f32(offsets=(8, 16))}, bytes(8)),
    "backwards": header({"a": f32(offsets=(8, 0))}, bytes(8)),
    "negative": header({"a": f32(offsets=(-8, 0))}, bytes(8)),
    "huge shape": header({"a": f32(shape=(HUGE, HUGE))}, bytes(8)),
    "huge and empty": header({"a": f32(shape=(1 << 70, 0), offsets=(0, 0))}),
    "many dimensions": header({"a": f32(shape=(1,) * 300, offsets=(0, 4))}, bytes(4)),
    "fractions": header({"a": f32(shape=(2.0,))}, bytes(8)),
    "truth": header({"a": f32(shape=(True, 2))}, bytes(8)),
    "text": header({"a": f32(shape="ab")}, bytes(8)),
    "infinity": header(b'{"a":{"dtype":"F32","shape":[Infinity],"data_offsets":[0,8]}}', bytes(8)),
    "long number": header(b'{"a":{"dtype":"F32","shape":[' + b"9" * 100_000 + b'],"data_offsets":[0,8]}}', bytes(8)),
    "no dtype": header({"a": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8)),
    "dtype of code": header({"a": f32(dtype="__import__('os')")}, bytes(8)),
    "metadata of numbers": header({"__metadata__": {"a": 1}, "a": f32()}, bytes(8)),
    "sharding that is no table": header({"__metadata__": {"DCP_SHARDING_INFO": "[1]"}, "a": f32()}, bytes(8)),
    "deep sharding": header({"__metadata__": {"DCP_SHARDING_INFO": "[" * 90_000}, "a": f32()}, bytes(8)),
    "offsets of text": header(
        {"__metadata__": {"DCP_SHARDING_INFO": '{"a":{"saved_offsets":"x"}}'}, "a": f32()}, bytes(8)
    ),
    "sharding of a list": header({"__metadata__": {"DCP_SHARDING_INFO": '{"a":[0]}'}, "a": f32()}, bytes(8)),
    "shape that is a number": header({"__metadata__": {"DCP_GLOBAL_SHAPES": '{"a":5}'}, "a": f32()}, bytes(8)),
    "huge whole": header({"__metadata__": {"DCP_GLOBAL_SHAPES": '{"a":[1e30]}'}, "a": f32()}, bytes(8)),
    "far away": header(
        {"__metadata__": {"DCP_SHARDING_INFO": '{"a":{"saved_offsets":[9223372036854775807]}}'}, "a": f32()}, bytes(8)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAFETENSORS)
def test_safetensors_headers(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(SAFETENSORS[name])
    reader = dcp_format.HuggingFaceStorageReader(tmp_path)
    with little_memory(256 << 20), pytest.raises(DcpError, match=r"model\.safetensors|contradict|'a'") as found:
        dcp.load({"a": torch.zeros(2)}, storage_reader=reader, no_dist=True)
    assert len(str(found.value)) < 4000


@pytest.mark.parametrize(
    "index",
    [
        b"[" * 100_000, b"{}", b'{"weight_map":[]}', b'{"weight_map":{"a":"../outside.safetensors"}}',
        b'{"weight_map":{"a":"/etc/passwd"}}', b'{"weight_map":{"a":7}}', b'{"weight_map":{"a":"other.safetensors"}}',
        b'{"weight_map":{"b":"model.safetensors"}}', b'{"weight_map":{"a":".."}}', b'{"weight_map":{"a":""}}',
    ],
    ids=["deep", "empty", "list", "parent", "absolute", "number", "missing", "other name", "dots", "nothing"],
)  # fmt: skip
def test_index_of_a_safetensors_folder(tmp_path: Path, index: bytes) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for place in (tmp_path / "outside.safetensors", folder / "model.safetensors"):
        place.write_bytes(header({"a": f32()}, bytes(8)))
    (folder / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(DcpError):
        dcp.load({"a": torch.zeros(2)}, storage_reader=dcp_format.HuggingFaceStorageReader(folder), no_dist=True)


def test_a_link_out_of_a_safetensors_folder(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(header({"a": f32()}, bytes(8)))
    (folder / "model.safetensors").symlink_to("../secret")
    with pytest.raises(UnsafeCheckpointError, match=r"model\.safetensors"):
        dcp.load({"a": torch.zeros(2)}, storage_reader=dcp_format.HuggingFaceStorageReader(folder), no_dist=True)
