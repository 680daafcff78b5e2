from __future__ import annotations

import io
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcp_io import LocalStore, StoreBackend, crc32, verify_checkpoint
from dcp_manifest.file import blob
from dcp_manifest.file.manifest_write import encode
from dcp_manifest.folders.folder import is_index_name
from dcp_manifest.index.columns import Framing, ManifestInfo, StoredItem
from integration_tests.kits.damage import flip

RNG = np.random.default_rng(3)
VALUES = [{"a": RNG.bytes(100), "b": RNG.bytes(300_000), "e": b""}, {"c": RNG.bytes(70_001)}]


@pytest.fixture(params=["torch", "raw"])
def saved(store, helpers, request):
    helpers.save_all(store, VALUES, layout=request.param)
    return store


def path(store, name):
    return os.path.join(store.path, name)


def damage(store, name, offset, bit=0):
    flip(path(store, name), offset, 1 << bit)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_sound_checkpoint(saved, threads):
    report = verify_checkpoint(saved, threads=threads)
    assert report.ok, report.problems
    assert report.items == 4
    assert report.bytes == sum(entry.bytes for entry in saved.list() if entry.name != ".metadata")
    assert report.unverified_keys == set()
    assert verify_checkpoint(saved.url) == report


@pytest.mark.parametrize("layout", ["torch", "raw"])
def test_no_byte_is_read_twice(store, helpers, layout):
    values = {f"t{number}": RNG.bytes(size) for number, size in enumerate([1 << 20] * 9 + [9 << 20, 5_000_001, 7])}
    helpers.save_all(store, [values], layout=layout)
    size = sum(entry.bytes for entry in store.list() if entry.name != ".metadata")
    seen = []
    report = verify_checkpoint(store, on_read=seen.append)
    assert report.ok, report.problems
    assert report.bytes == sum(seen) == size


def test_a_sound_checkpoint_without_a_coordinator(store, helpers):
    helpers.save_all(store, VALUES, rank_local_id="one")
    report = verify_checkpoint(store)
    assert report.ok, report.problems
    assert report.items == 4


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(file=st.integers(0, 2), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_every_flipped_bit_is_reported(saved, file, place, bit):
    entry = sorted(saved.list(), key=lambda entry: entry.name)[file]
    at = int(place * entry.bytes)
    damage(saved, entry.name, at, bit)
    try:
        report = verify_checkpoint(saved)
    finally:
        damage(saved, entry.name, at, bit)
    assert not report.ok
    assert all(problem.file == entry.name for problem in report.problems)
    if entry.name != ".metadata":
        (problem,) = report.problems
        assert problem.offset is not None
        assert problem.offset <= at


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(file=st.integers(1, 2), place=st.floats(0, 1, exclude_max=True))
def test_every_truncation_is_reported(saved, file, place):
    entry = sorted(saved.list(), key=lambda entry: entry.name)[file]
    whole = saved.read(entry.name)
    os.truncate(path(saved, entry.name), int(place * entry.bytes))
    try:
        report = verify_checkpoint(saved)
    finally:
        with open(path(saved, entry.name), "wb") as handle:
            handle.write(whole)
    (problem,) = report.problems
    assert "truncated" in problem.message
    assert problem.key == problem.lost_keys[0]


def test_a_cut_or_missing_file_is_one_problem(saved):
    index = StoreBackend(saved).read_index()
    name = index.stored_item(index.chunk_items, index.tensor_names.index("b")).file
    whole = saved.size(name)
    os.truncate(path(saved, name), 60)
    (problem,) = verify_checkpoint(saved).problems
    assert f"the file ends at 60 of {whole:,} bytes; 3 items are lost" in problem.message
    assert (problem.file, problem.offset, set(problem.lost_keys)) == (name, 60, {"a", "b", "e"})
    saved.delete(name)
    (problem,) = verify_checkpoint(saved).problems
    assert "3 items are lost" in problem.message
    assert set(problem.lost_keys) == {"a", "b", "e"}


def test_the_damaged_block_is_named(saved):
    backend = StoreBackend(saved)
    index = backend.read_index()
    item = index.stored_item(index.chunk_items, index.tensor_names.index("b"))
    damage(saved, item.file, item.offset + item.lead + 200_000)
    (problem,) = verify_checkpoint(saved).problems
    assert problem.key == "b"
    assert item.offset + item.lead + 131_072 <= problem.offset <= item.offset + item.lead + 200_000
    assert "'b'" in str(problem)
    assert item.file in str(problem)


def test_bytes_behind_the_last_item_and_missing_files_are_reported(saved):
    one, two = sorted(entry.name for entry in saved.list() if entry.name != ".metadata")
    with open(path(saved, one), "ab") as file:
        file.write(b"x")
    saved.delete(two)
    first, second = verify_checkpoint(saved).problems
    assert (first.file, first.message) == (one, "1 bytes follow the last item")
    assert (second.file, second.key) == (two, "c")
    assert "missing" in second.message


def test_swapped_files_are_reported(saved):
    one, two = sorted(path(saved, entry.name) for entry in saved.list() if entry.name != ".metadata")
    os.rename(one, one + "x")
    os.rename(two, one)
    os.rename(one + "x", two)
    assert {problem.file for problem in verify_checkpoint(saved).problems} == {os.path.basename(p) for p in (one, two)}


def test_no_checkpoint_and_a_damaged_index(store):
    (problem,) = verify_checkpoint(store).problems
    assert "no checkpoint" in problem.message
    store.publish(".metadata", b"damaged")
    report = verify_checkpoint(store)
    assert report.problems
    assert report.problems[0].file == ".metadata"
    with pytest.raises(ValueError, match="threads=0"):
        verify_checkpoint(store, threads=0)


def publish_index(store, helpers, tensors, objects=None, *, info=True):
    info = ManifestInfo("one", 1, "test") if info else None
    store.publish(".metadata", encode(helpers.make_index(tensors, objects, info=info)))


def test_holes_gaps_and_overlaps_are_reported(store, helpers):
    store.publish("x", bytes(300))
    crc = crc32(bytes(10))
    publish_index(
        store,
        helpers,
        {
            "a": ("uint8", (10,), StoredItem("x", 0, 10, 0, 10, Framing.RAW, crc)),
            "b": ("uint8", (10,), StoredItem("x", 5, 10, 0, 10, Framing.RAW, crc)),
            "c": ("uint8", (10,), StoredItem("x", 290, 10, 0, 10, Framing.RAW, crc)),
        },
    )
    messages = [problem.message for problem in verify_checkpoint(store).problems]
    assert messages == ["the item overlaps the one before it", "275 bytes belong to no item"]


def test_archives_of_others(store, helpers):
    torch = pytest.importorskip("torch", reason="torch writes the archive")
    buffer = io.BytesIO()
    torch.save(torch.arange(4000), buffer)
    data = buffer.getvalue()
    store.publish("x", data + data + b"plain")
    items = {
        "one": StoredItem("x", 0, len(data), 0, len(data), Framing.OBJECT),
        "two": StoredItem("x", len(data), len(data), 0, len(data), Framing.OBJECT),
        "odd": StoredItem("x", 2 * len(data), 5, 0, 5, Framing.OBJECT),
    }
    publish_index(store, helpers, {}, items)
    report = verify_checkpoint(store)
    assert report.ok, report.problems
    assert report.unverified_keys == {"odd"}
    damage(store, "x", len(data) + len(data) // 2)
    (problem,) = verify_checkpoint(store).problems
    assert (problem.key, problem.offset) == ("two", len(data))


@pytest.mark.parametrize("rank_local_id", [None, "0123456789abcdef"])
def test_each_index_is_read_and_decoded_once(store, helpers, monkeypatch, rank_local_id):
    helpers.save_all(store, [{"a": bytes(1000)}, {"b": bytes(500)}], rank_local_id=rank_local_id)
    names = [entry.name for entry in store.list() if is_index_name(entry.name)]
    read, decoded, seen = [], [], []
    real_read, real_parse = LocalStore.read, blob._parse_header
    monkeypatch.setattr(LocalStore, "read", lambda self, name: (read.append(name), real_read(self, name))[1])
    monkeypatch.setattr(
        blob, "_parse_header", lambda text, **facts: (decoded.append(facts["file"]), real_parse(text, **facts))[1]
    )
    report = verify_checkpoint(store, on_read=seen.append)
    assert report.ok
    assert sorted(read) == sorted(decoded) == sorted(names)
    assert seen
