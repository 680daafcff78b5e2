"""What a catalogue says of checkpoints without an index."""

from __future__ import annotations

import json
import os

import pytest

from dcp_io import LocalStore
from dcp_io.roots.catalogue import Catalogue


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
    assert found[1].text.endswith("step-10 has 1 data file with 1.95 KiB, and no index: its save was interrupted")
    assert "a copy from /nvme on node7, where it has 4.88 KiB, was interrupted" in found[0].text


@pytest.mark.parametrize(
    "journal",
    [b"", b"\xff", b"[]", b'{"from": 3}', b"[" * 100_000, b'{"bytes": "x"}'],
)
def test_a_hostile_journal_says_nothing(catalogue, tmp_path, journal):
    half(tmp_path, 10, promoting=journal)
    (found,) = catalogue.unfinished(-1)
    assert found.text.endswith(": its save was interrupted")


@pytest.mark.parametrize(
    ("journal", "text"), [(b'{"from": "x", "bytes": 1e999}', "a copy from x"), (b'{"from": 3, "bytes": 5}', "its save")]
)
def test_one_odd_value_of_a_journal_leaves_the_other(catalogue, tmp_path, journal, text):
    half(tmp_path, 10, promoting=journal)
    (found,) = catalogue.unfinished(-1)
    assert text in found.text


@pytest.fixture
def published(tmp_path):
    """A folder with an index."""
    folder = tmp_path / "step-10"
    folder.mkdir()
    (folder / ".metadata").write_bytes(b"\x80")
    return folder


@pytest.mark.parametrize(
    ("name", "text", "is_journal"),
    [
        (".dcp-promoting.json", "{}", True),
        (".dcp-promoting-0123456789abcdef.json", '{"save_id": "cut o', True),
        (".dcp-promoting.json", "", True),
        (".dcp-promoting.json", "notes of mine", False),
        (".dcp-promoting.json.bak", "{}", False),
        (".dcp-promoting-notes-of-alice.json", "{}", False),
        (".dcp-promoting-how-to.md", "{}", False),
    ],
)
def test_only_journals_are_removed_beside_a_checkpoint(catalogue, published, name, text, is_journal):
    (published / name).write_text(text)
    os.utime(published / name, (0, 0))
    catalogue.sweep()
    assert (published / name).exists() != is_journal


@pytest.mark.parametrize("kind", ["fifo", "link", "folder"])
def test_what_is_no_file_is_not_removed_as_a_journal(catalogue, published, tmp_path, kind):
    name = published / ".dcp-promoting.json"
    if kind == "fifo":
        os.mkfifo(name)
    elif kind == "link":
        (tmp_path / "mine.json").write_text("{}")
        name.symlink_to(tmp_path / "mine.json")
    else:
        name.mkdir()
    catalogue.sweep()
    assert os.path.lexists(name)


@pytest.mark.parametrize("name", ["promoting.json", "note-next.json", "save-0123", "reading-0123"])
def test_a_leftover_that_may_not_be_read_is_left(catalogue, published, tmp_path, monkeypatch, caplog, name):
    (published / f".dcp-{name}").write_text("{}")
    os.utime(published / f".dcp-{name}", (0, 0))
    (tmp_path / "step-20").mkdir()
    (tmp_path / "step-20" / "__0_0.abc.distcp").write_bytes(b"\0" * 2000)
    for method in ("open", "read"):
        real = getattr(LocalStore, method)

        def refuse(store, asked, *rest, real=real, **more):
            if asked == f".dcp-{name}":
                raise PermissionError(13, "Permission denied", asked)
            return real(store, asked, *rest, **more)

        monkeypatch.setattr(LocalStore, method, refuse)
    assert catalogue.sweep() == [20]
    assert (published / f".dcp-{name}").exists()
    assert "leftovers of step 10 stay" in caplog.text


@pytest.mark.parametrize("hidden", ["folder", ".dcp-note.json", ".dcp-quarantined.json"])
def test_what_may_not_be_read_hides_no_other_step(catalogue, published, tmp_path, monkeypatch, caplog, hidden):
    (tmp_path / "step-20").mkdir()
    (tmp_path / "step-20" / ".metadata").write_bytes(b"\x80")
    if hidden != "folder":
        (tmp_path / "step-20" / hidden).write_text("{}")
    method = "list" if hidden == "folder" else "read"
    real = getattr(LocalStore, method)

    def refuse(store, *asked):
        if store.path.endswith("step-20") and (hidden == "folder" or asked == (hidden,)):
            raise PermissionError(13, "Permission denied", store.path)
        return real(store, *asked)

    monkeypatch.setattr(LocalStore, method, refuse)
    known = [10, 20] if hidden != "folder" else [10]
    assert [record.step for record in catalogue.records()] == known
    assert catalogue.highest().step == (20 if hidden == ".dcp-note.json" else 10)
    assert "Permission denied" in caplog.text


def test_a_folder_without_data_is_nothing(catalogue, tmp_path):
    (tmp_path / "step-10").mkdir()
    (tmp_path / "step-10" / ".dcp-note.json").write_text("{}")
    assert catalogue.unfinished(-1) == []
