"""Reads that are refused: damaged bytes, replaced files, and impossible requests."""

from __future__ import annotations

import io
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcp_io.reading import read_plan
from dcp_io.reading.read_engine import read_items
from dcp_io.requests import ReadRequest
from dcp_manifest.errors import CheckpointNotFoundError, CorruptCheckpointError
from dcp_manifest.index.columns import Framing, StoredItem, block_bytes


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), direct=st.booleans(), data=st.data())
def test_a_flipped_bit_in_what_is_read_is_refused(store, helpers, written, place, bit, direct, data):
    values, items = written
    item = items["t5"]
    at = int(place * item.stored_bytes)
    start = data.draw(st.integers(0, at))
    stop = data.draw(st.integers(at + 1, item.stored_bytes))
    helpers.flip(store, item.file, item.offset + item.lead + at, bit)
    try:
        target = helpers.target("t5", item, start, stop, direct=direct)
        with pytest.raises(CorruptCheckpointError, match="differ from what was written") as caught:
            read_items(store, [target.request], threads=2)
    finally:
        helpers.flip(store, item.file, item.offset + item.lead + at, bit)
    assert (caught.value.file, caught.value.key) == (item.file, "t5")
    named = caught.value.offset - item.offset - item.lead
    assert named <= at < named + block_bytes(item.stored_bytes)
    assert target.seen == []
    del values


def test_a_flip_elsewhere_is_harmless(store, helpers, written):
    data, items = written
    item = items["t5"]
    helpers.flip(store, item.file, item.offset + 3)
    helpers.flip(store, item.file, item.offset + item.length - 1)
    helpers.flip(store, item.file, item.offset + item.lead)
    block = block_bytes(item.stored_bytes)
    target = helpers.target("t5", item, block, 3 * block, direct=True)
    read_items(store, [target.request])
    target.check(data["t5"][block : 3 * block])


@pytest.mark.parametrize("direct", [True, False])
def test_truncation_at_any_length_is_refused(store, helpers, written, direct):
    _, items = written
    for key in ("t2", "t5"):
        item = items[key]
        whole = store.read(item.file)
        end = item.offset + item.lead + item.stored_bytes
        for length in {0, 1, item.offset, item.offset + item.lead, end - 1}:
            os.truncate(os.path.join(store.path, item.file), length)
            target = helpers.target(key, item, 0, item.stored_bytes, direct=direct)
            with pytest.raises(CorruptCheckpointError, match="truncated") as caught:
                read_items(store, [target.request])
            assert (caught.value.file, caught.value.key) == (item.file, key)
            with open(os.path.join(store.path, item.file), "wb") as handle:
                handle.write(whole)


def test_a_missing_file_is_named_with_a_key(store, helpers, written):
    _, items = written
    store.delete(items["t3"].file)
    with pytest.raises(CheckpointNotFoundError, match=rf"{items['t3'].file} is missing.*'t3' is stored in it"):
        read_items(store, [helpers.target("t3", items["t3"], 0, 10, direct=False).request])


def test_swapped_files_are_refused(store, helpers, written):
    _, items = written
    one, two = sorted({item.file for item in items.values()})
    paths = [os.path.join(store.path, name) for name in (one, two)]
    os.rename(paths[0], paths[0] + "x")
    os.rename(paths[1], paths[0])
    os.rename(paths[0] + "x", paths[1])
    for key in ("t1", "t2", "t3", "t4", "t5"):
        target = helpers.target(key, items[key], 0, items[key].stored_bytes, direct=False)
        with pytest.raises(CorruptCheckpointError) as caught:
            read_items(store, [target.request])
        assert caught.value.key == key


def test_before_changes_nothing_on_failure(store, helpers, written):
    data, items = written
    item = items["t5"]
    helpers.flip(store, item.file, item.offset + item.lead + item.stored_bytes - 1)
    targets = [helpers.target(key, item, 0, item.stored_bytes, direct=True) for key, item in items.items()]
    changed = set()
    with pytest.raises(CorruptCheckpointError):
        read_items(store, [target.request for target in targets], verify="before", changed_keys=changed)
    assert changed == set()
    assert all(not any(target.memory) and not target.seen for target in targets)
    with pytest.raises(CorruptCheckpointError):
        read_items(store, [target.request for target in targets], verify="blocks", changed_keys=changed)
    assert "t5" in changed
    for target in targets:
        assert target.request.key in changed or not any(target.memory)
    del data


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"start": -1}, ValueError, "outside its stored range"),
        ({"start": 5, "stop": 4}, ValueError, "outside its stored range"),
        ({"stop": 1 << 40}, ValueError, "outside its stored range"),
        ({"into": memoryview(bytearray(3))}, ValueError, "destination"),
        ({"into": memoryview(bytearray(10)), "piece": print}, ValueError, "piece function"),
    ],
)
def test_contradictory_requests_are_refused(store, written, change, error, message):
    _, items = written
    values = {"key": "t3", "item": items["t3"], "start": 0, "stop": 10, **change}
    with pytest.raises(error, match=message):
        read_items(store, [ReadRequest(**values)])


@pytest.mark.parametrize(
    "item",
    [
        StoredItem("x", -5, 10, 0, 10, Framing.RAW, 1),
        StoredItem("x", 0, 5, 0, 10, Framing.RAW, 1),
        StoredItem("x", 0, 15, -1, 10, Framing.RAW, 1),
        StoredItem("x", 0, 15, 6, 10, Framing.RAW, 1),
        StoredItem("x", 0, 10, 0, 10, Framing.RAW, 1, np.zeros(3, np.uint32)),
        StoredItem("x", 1 << 60, 1 << 50, 0, 1 << 50, Framing.TORCH_ZIP),
    ],
)
def test_impossible_places_are_refused_before_anything_is_allocated(store, item):
    store.publish("x", bytes(100))
    with pytest.raises(CorruptCheckpointError) as caught:
        read_items(store, [ReadRequest("k", item, 0, item.stored_bytes)])
    assert caught.value.key == "k"


def archive_item(store, data, framing=Framing.TORCH_ZIP, **options):
    store.publish("x", bytes(7) + data)
    return StoredItem("x", 7, len(data), 0, len(data), framing, **options)


@pytest.fixture
def stock_archive():
    torch = pytest.importorskip("torch", reason="torch writes the archive")
    buffer = io.BytesIO()
    torch.save(torch.arange(5000), buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("framing", [Framing.TORCH_ZIP, Framing.OBJECT])
def test_archives_of_others_are_checked_by_their_own_crcs(store, helpers, stock_archive, framing):
    item = archive_item(store, stock_archive, framing)
    whole = helpers.target("k", item, 0, item.stored_bytes, direct=False)
    assert read_items(store, [whole.request]).unverified_keys == set()
    whole.check(stock_archive)
    helpers.flip(store, "x", 7 + len(stock_archive) // 2)
    with pytest.raises(CorruptCheckpointError, match="archive is damaged"):
        read_items(store, [helpers.target("k", item, 0, item.stored_bytes, direct=True).request])
    part = helpers.target("k", item, 5, 9, direct=False)
    assert read_items(store, [part.request]).unverified_keys == {"k"}
    part.check(stock_archive[5:9])
    with pytest.raises(CorruptCheckpointError, match="archive is damaged"):
        read_items(store, [helpers.target("k", item, 5, 9, direct=False).request], verify="full")


def test_what_carries_no_crc_is_reported(store, helpers):
    data = b"an object that is no archive"
    item = archive_item(store, data, Framing.OBJECT)
    target = helpers.target("k", item, 0, len(data), direct=False)
    assert read_items(store, [target.request]).unverified_keys == {"k"}
    target.check(data)
    encoded = archive_item(store, data, Framing.TORCH_ZIP, chain=("stream.zstd/1",))
    assert read_items(store, [helpers.target("k", encoded, 0, len(data), direct=False).request]).unverified_keys == {
        "k"
    }
    tensor = archive_item(store, data, Framing.TORCH_ZIP)
    with pytest.raises(CorruptCheckpointError, match="archive is damaged"):
        read_items(store, [helpers.target("k", tensor, 0, len(data), direct=False).request])


def without_block_crcs(item):
    return StoredItem(item.file, item.offset, item.length, item.lead, item.stored_bytes, Framing.RAW, item.crc32)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("direct", [True, False])
def test_a_single_crc_for_many_blocks_is_checked_with_the_whole(store, helpers, written, monkeypatch, direct, threads):
    monkeypatch.setattr(read_plan, "STEP_BYTES", 1)
    data, items = written
    item = without_block_crcs(items["t5"])
    helpers.flip(store, item.file, item.offset + item.lead + 7)
    part = helpers.target("t5", item, 500_000, 900_000, direct=direct)
    stats = read_items(store, [part.request], threads=threads)
    assert (stats.bytes_read, stats.unverified_keys) == (400_000, {"t5"})
    part.check(data["t5"][500_000:900_000])
    for start, stop, verify in [(0, item.stored_bytes, "blocks"), (500_000, 900_000, "full")]:
        target = helpers.target("t5", item, start, stop, direct=direct)
        with pytest.raises(CorruptCheckpointError, match="differ from what was written"):
            read_items(store, [target.request], threads=threads, verify=verify)
        assert target.seen == []
    helpers.flip(store, item.file, item.offset + item.lead + 7)
    part = helpers.target("t5", item, 500_000, 900_000, direct=direct)
    stats = read_items(store, [part.request], threads=threads, verify="full")
    assert (stats.bytes_read, stats.unverified_keys) == (item.stored_bytes, set())
    part.check(data["t5"][500_000:900_000])
