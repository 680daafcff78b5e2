"""Archives of several records, checked with Python's own reader."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

import dcp_io.archives.zip_format
from dcp_io import LocalStore
from dcp_io.archives.archive_checks import verify_zip, zip_records
from dcp_io.archives.zip_format import ZipFileWriter

RECORDS = {
    "data.pkl": [b"pickle"],
    "empty": [],
    "data/0": [b"a" * 3_000_000, b"b", b"c" * 2_000_000],
    "data/1": [b"x"] * 99,
}


def written(folder: Path, records: dict[str, list[bytes]]) -> Path:
    sink = LocalStore(folder).create("a.pt")
    archive = ZipFileWriter(sink)
    for name, pieces in records.items():
        archive.add(name, sum(map(len, pieces)), pieces)
    archive.finish()
    sink.close()
    return folder / "a.pt"


@pytest.mark.parametrize("wide_from", [None, 1000, 0])
def test_records_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wide_from: int | None) -> None:
    if wide_from is not None:  # what a record of 4 GiB would do
        monkeypatch.setattr(dcp_io.archives.zip_format, "ZIP64_FROM_BYTES", wide_from)
    path = written(tmp_path, RECORDS)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert {name: archive.read(f"archive/{name}") for name in RECORDS} == {
            name: b"".join(pieces) for name, pieces in RECORDS.items()
        }
    data = path.read_bytes()
    assert verify_zip(data)
    assert all(record.start % 64 == 0 for record in zip_records(data))


def test_many_records(tmp_path: Path) -> None:
    path = written(tmp_path, {f"data/{n}": [b"%d" % n] for n in range(70_000)})
    with zipfile.ZipFile(path) as archive:
        assert len(archive.namelist()) == 70_000
        assert archive.read("archive/data/69999") == b"69999"


def test_announced_length_is_kept(tmp_path: Path) -> None:
    sink = LocalStore(tmp_path).create("a.pt")
    with pytest.raises(ValueError, match="has 3 bytes; 4 were announced"):
        ZipFileWriter(sink).add("x", 4, [b"abc"])
    sink.abort()
