"""What a catalogue says of checkpoints without an index."""

from __future__ import annotations

import json

import pytest

from dcp_io import Catalogue, LocalStore


@pytest.fixture
def catalogue(tmp_path):
    return Catalogue(LocalStore(tmp_path), stale_after_seconds=30)


def half(tmp_path, step, **files):
    folder = tmp_path / f"step-{step}"
    folder.mkdir()
    (folder / "__0_0.abc.distcp").write_bytes(b"x" * 2000)
    for name, data in files.items():
        (folder / f".dcp-{name}.json").write_bytes(data)


def test_an_interrupted_save_and_a_copy(catalogue, tmp_path):
    half(tmp_path, 5)
    half(tmp_path, 10)
    half(tmp_path, 20, promoting=json.dumps({"from": "/nvme on node7", "bytes": 5000}).encode())
    found = catalogue.unfinished(5)
    assert [(one.step, one.is_running) for one in found] == [(20, False), (10, False)]
    assert found[1].text.endswith("step-10 has 1 data files with 1.95 KiB, and no index: its save was interrupted")
    assert "a copy from /nvme on node7, where it has 4.88 KiB, was interrupted" in found[0].text


@pytest.mark.parametrize(
    "journal",
    [b"", b"\xff", b"[]", b'{"from": 3}', b"[" * 100_000, b'{"from": "x", "bytes": 1e999}', b'{"bytes": "x"}'],
)
def test_a_hostile_journal_says_nothing(catalogue, tmp_path, journal):
    half(tmp_path, 10, promoting=journal)
    (found,) = catalogue.unfinished(-1)
    assert found.text.endswith(": its save was interrupted")


def test_a_folder_without_data_is_nothing(catalogue, tmp_path):
    (tmp_path / "step-10").mkdir()
    (tmp_path / "step-10" / ".dcp-note.json").write_text("{}")
    assert catalogue.unfinished(-1) == []
