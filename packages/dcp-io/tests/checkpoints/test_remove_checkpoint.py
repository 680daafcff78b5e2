"""Removing checkpoints: all of it, nothing else, and in an order that can be interrupted."""

from __future__ import annotations

import os

from dcp_io import remove_checkpoint
from dcp_io.saves.cleanup import read_current

VALUES = [{"a": bytes(1000)}, {"b": bytes(500)}]


def test_all_of_it_goes(store, helpers):
    helpers.save_all(store, VALUES)
    for name in (".dcp-save-0123", "..dcp-save-0123.x.0123abcd.tmp", "__0.metadata", "__9_9.left.distcp"):
        store.publish(name, b"")
    assert remove_checkpoint(store) == []
    assert not os.path.exists(store.path)
    assert remove_checkpoint(store) == []


def test_files_of_others_stay(store, helpers):
    helpers.save_all(store, VALUES)
    for name in ("notes.txt", "mine", "latest"):
        store.publish(name, b"")
    assert remove_checkpoint(store, also=frozenset({"mine"})) == ["latest", "notes.txt"]
    assert helpers.names(store) == ["latest", "notes.txt"]


def test_files_in_folders_go_when_the_index_names_them(store, helpers):
    store.child("below").make()
    helpers.save_all(store, VALUES)
    index = read_current(store).index
    old = index.files[0]
    os.rename(os.path.join(store.path, old), os.path.join(store.path, "below", old))
    moved = helpers.make_index(
        {"a": ("uint8", (1000,), _moved(index.stored_item(index.chunk_items, 0), f"below/{old}"))}, info=index.info
    )
    from dcp_manifest.file.manifest_write import encode

    store.publish(".metadata", encode(moved))
    assert remove_checkpoint(store) == []
    assert store.child("below").list() == []


def _moved(item, file):
    from dataclasses import replace

    return replace(item, file=file)


def test_what_an_interruption_leaves_is_no_checkpoint(store, helpers, monkeypatch):
    helpers.save_all(store, VALUES)
    count = len(store.list())
    for limit in range(1, count):
        deleted = []

        def delete(name, limit=limit, deleted=deleted):
            if len(deleted) == limit:
                raise OSError("interrupted")
            deleted.append(name)
            type(store).delete(store, name)

        monkeypatch.setattr(store, "delete", delete)
        try:
            remove_checkpoint(store)
        except OSError:
            assert not read_current(store).exists
        monkeypatch.undo()
    assert remove_checkpoint(store) == []
