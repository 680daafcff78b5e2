from __future__ import annotations

import contextlib
import os
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcp_io.reading import read_engine, read_plan
from dcp_io.reading.read_engine import read_items
from dcp_io.requests import ReadRequest
from dcp_io.writing.write_engine import write_items
from dcp_manifest.errors import CorruptCheckpointError
from dcp_manifest.index.columns import Framing, StoredItem, block_bytes
from dcp_manifest.index.runs import Runs

RNG = np.random.default_rng(1)
SIZES = [0, 1, 63, 70_000, 300_000, 1_500_000]  # of what `written` wrote
VERIFY = ["blocks", "full", "before", True, False]


@pytest.mark.parametrize("verify", VERIFY)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("direct", [True, False])
def test_whole_items(store, helpers, written, verify, threads, direct):
    data, items = written
    targets = [helpers.target(key, item, 0, item.stored_bytes, direct=direct) for key, item in items.items()]
    changed = set()
    stats = read_items(
        store, [target.request for target in targets], threads=threads, verify=verify, changed_keys=changed
    )
    for target, expected in zip(targets, data.values(), strict=True):
        target.check(expected)
    assert changed == set(data)
    assert stats.unverified_keys == (set(data) - {"t0"} if verify is False else set())
    passes = 2 if verify == "before" else 1
    assert passes * sum(SIZES) <= stats.bytes_read <= passes * (sum(SIZES) + 20_000)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cuts=st.lists(
        st.tuples(st.sampled_from(range(len(SIZES))), st.floats(0, 1), st.floats(0, 1), st.booleans()), max_size=8
    ),
    verify=st.sampled_from(VERIFY),
    threads=st.integers(1, 3),
    stream_min=st.sampled_from([1, 100_000]),
    step=st.sampled_from([1, 200_000]),
    gap=st.sampled_from([0, 1000]),
)
def test_any_ranges(store, helpers, written, monkeypatch, cuts, verify, threads, stream_min, step, gap):
    data, items = written
    with monkeypatch.context() as patch:
        patch.setattr(read_plan, "STREAM_MIN_BYTES", stream_min)
        patch.setattr(read_plan, "STEP_BYTES", step)
        patch.setattr(read_plan, "GAP_BYTES", gap)
        targets = []
        for number, one, two, direct in cuts:
            start, stop = sorted((int(one * SIZES[number]), int(two * SIZES[number])))
            targets.append((helpers.target(f"t{number}", items[f"t{number}"], start, stop, direct=direct), start, stop))
        read_items(store, [target.request for target, _, _ in targets], threads=threads, verify=verify)
    for target, start, stop in targets:
        target.check(data[target.request.key][start:stop])


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("verify", ["blocks", "full"])
def test_bytes_read_are_those_of_the_touched_blocks(store, helpers, written, direct, verify):
    _, items = written
    item = items["t5"]
    block = block_bytes(item.stored_bytes)
    target = helpers.target("t5", item, block + 1, 8 * block - 1, direct=direct)
    stats = read_items(store, [target.request], verify=verify)
    assert stats.bytes_read == (7 * block if verify == "blocks" else item.stored_bytes)
    target = helpers.target("t5", item, block + 1, 8 * block - 1, direct=direct)
    assert read_items(store, [target.request], verify=False).bytes_read == 7 * block - 2


def test_overlapping_requests_read_each_byte_once(store, helpers, written):
    data, items = written
    item = items["t5"]
    targets = [helpers.target("t5", item, n * 1000, n * 1000 + 500_000, direct=False) for n in range(20)]
    stats = read_items(store, [target.request for target in targets], threads=2)
    for n, target in enumerate(targets):
        target.check(data["t5"][n * 1000 : n * 1000 + 500_000])
    assert stats.bytes_read <= 519_000 + 2 * block_bytes(item.stored_bytes)


def test_neighbours_share_a_read(store, helpers):
    requests = [helpers.raw_request(f"s{n}", RNG.bytes(4), "float32", ()) for n in range(2000)]
    items = write_items(store, requests, prefix="__0_", save_id="abc", sync=False)
    calls = []

    class Counting(type(store)):
        def open(self, name):
            source = super().open(name)
            real = source.read_into

            class Wrapped:
                size = source.size
                will_need = source.will_need
                close = source.close

                def read_into(self, offset, buffers):
                    calls.append(offset)
                    real(offset, buffers)

            return Wrapped()

    counting = Counting(store.path)
    assert len(helpers.read_back(counting, {f"s{n}": item for n, item in enumerate(items)})) == 2000
    assert len(calls) == 1


def test_many_small_unverified_parts_of_an_item_share_reads(store, helpers, written, monkeypatch):
    data, items = written
    calls = []
    real = type(store.open(items["t5"].file)).read_into
    monkeypatch.setattr(
        "dcp_io.stores.local_store._LocalSource.read_into",
        lambda *args: calls.append(args[1]) or real(*args),
        raising=True,
    )
    targets = [helpers.target("t5", items["t5"], n * 500, n * 500 + 500, direct=True) for n in range(3000)]
    read_items(store, [target.request for target in targets], verify=False)
    for n, target in enumerate(targets):
        target.check(data["t5"][n * 500 : n * 500 + 500])
    assert len(calls) <= 1_500_000 // block_bytes(1_500_000) + 1


def test_an_error_of_done_is_raised_and_stops_the_rest(store, written, monkeypatch):
    monkeypatch.setattr(read_plan, "SHARED_LIMIT_BYTES", 0)
    _, items = written
    item = items["t5"]
    seen = []

    def bad(data):
        seen.append(len(data))
        raise KeyError("mine")

    requests = [ReadRequest("t5", item, n * 1000, n * 1000 + 10, None, bad) for n in range(50)]
    with pytest.raises(KeyError, match="mine"):
        read_items(store, requests, threads=3)
    assert len(seen) <= 3


def test_few_files_are_open_at_a_time(store, helpers):
    requests = [helpers.raw_request(f"t{n}", b"x") for n in range(100)]
    items = write_items(store, requests, prefix="__0_", save_id="abc", single_file=False, sync=False)
    most = []
    requests = [ReadRequest("t", item, 0, 1, None, lambda data: most.append(open_files(store))) for item in items]
    read_items(store, requests, threads=2)
    assert 0 < max(most) <= 4 + read_engine._READS_AHEAD
    assert open_files(store) == 0


def open_files(store):
    """Number of files of a store that this process has open; its other open files may change at any time."""
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found += os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"{store.path}/")
    return found


class Pieces:
    """Collects the pieces of a range of an item, of which only the wanted runs are compared."""

    def __init__(self, key, item, start, stop, runs=None):
        self.memory = bytearray(item.stored_bytes)
        self.places = []
        self.done = 0
        self.request = ReadRequest(key, item, start, stop, None, self.finish, self.take, runs)

    def take(self, position, data):
        assert len(data) > 0
        self.places.append((position, position + len(data)))
        self.memory[position : position + len(data)] = data

    def finish(self, data):
        assert len(data) == 0 or self.request.stop - self.request.start < read_plan.STREAM_MIN_BYTES
        self.done += 1

    def check(self, expected, block):
        request = self.request
        assert self.done == 1
        ends = sorted(self.places)
        assert [stop for _, stop in ends[:-1]] == [start for start, _ in ends[1:]], "disjoint, without holes"
        assert (ends[0][0], ends[-1][1]) == (request.start, request.stop)
        assert all(stop % block == 0 for _, stop in ends[:-1])
        assert self.memory[request.start : request.stop] == expected[request.start : request.stop]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ranges=st.lists(st.tuples(st.integers(0, 1_499_000), st.integers(1, 1_500_000)), min_size=1, max_size=4),
    grid=st.none() | st.tuples(st.integers(1, 5000), st.integers(1, 200), st.integers(0, 20_000)),
    verify=st.sampled_from(VERIFY),
    threads=st.integers(1, 3),
    step=st.sampled_from([1, 200_000, 8 << 20]),
)
def test_pieces_are_disjoint_whole_and_right(store, written, monkeypatch, ranges, grid, verify, threads, step):
    data, items = written
    item = items["t5"]
    wanted = []
    for start, length in ranges:
        stop = min(item.stored_bytes, start + length)
        runs = None
        if grid is not None:
            run, count, gap = grid
            count = min(count, max(1, (stop - start) // (run + gap)))
            runs = Runs(start, min(run, stop - start), (count,), (run + gap,))
            stop = runs.stop
        wanted.append(Pieces("t5", item, start, stop, runs))
    with monkeypatch.context() as patch:
        patch.setattr(read_plan, "STEP_BYTES", step)
        read_items(store, [one.request for one in wanted], threads=threads, verify=verify)
    for one in wanted:
        if grid is None:
            one.check(data["t5"], block_bytes(item.stored_bytes))
        else:
            assert one.done == 1
            for start, stop in zip(*one.request.runs.within(0, 1 << 30), strict=True):
                assert one.memory[start:stop] == data["t5"][start:stop]


def test_requests_for_one_item_never_read_a_byte_twice(store, helpers, written):
    data, items = written
    item = items["t5"]
    columns = [Runs(n * 2048, 2048, (183,), (8192,)) for n in range(4)]
    for verify in (True, False):
        wanted = [Pieces("t5", item, runs.start, runs.stop, runs) for runs in columns]
        targets = [helpers.target("t5", item, 300_001 * n, 300_001 * n + 299_000, direct=True) for n in range(5)]
        everything = helpers.target("t5", item, 7, item.stored_bytes - 7, direct=False)
        stats = read_items(store, [one.request for one in (*wanted, *targets, everything)], threads=2, verify=verify)
        assert stats.bytes_read <= item.stored_bytes
        for n, target in enumerate(targets):
            target.check(data["t5"][300_001 * n : 300_001 * n + 299_000])
        everything.check(data["t5"][7:-7])
        for one in wanted:
            for start, stop in zip(*one.request.runs.within(0, 1 << 30), strict=True):
                assert one.memory[start:stop] == data["t5"][start:stop]


@pytest.mark.parametrize(
    ("verify", "runs", "most"),
    [
        ("blocks", Runs(0, 2048, (183,), (8192,)), 4.05),
        (False, Runs(0, 2048, (183,), (8192,)), 1.0),
        (False, Runs(0, 2048, (240,), (6000,)), 6000 / 2048),
        ("blocks", Runs(0, 64, (3,), (700_000,)), 3 * 65_536 / (3 * 64)),
    ],
    ids=["columns verified", "columns", "gaps under 4 KiB", "few blocks"],
)
def test_gaps_between_runs_are_skipped(store, written, verify, runs, most):
    _, items = written
    wanted = Pieces("t5", items["t5"], runs.start, runs.stop, runs)
    stats = read_items(store, [wanted.request], verify=verify)
    assert stats.bytes_read / (runs.run_bytes * runs.counts[0]) <= most


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("limit", [1, 3 << 20, 64 << 20])
def test_buffers_stay_within_the_limit(store, helpers, monkeypatch, limit, threads):
    big = RNG.bytes(20 << 20)
    small = {f"s{n}": RNG.bytes(200_000) for n in range(40)}
    requests = [helpers.raw_request(key, value) for key, value in {"big": big, **small}.items()]
    items = dict(
        zip(["big", *small], write_items(store, requests, prefix="__0_", save_id="abc", sync=False), strict=True)
    )
    held = []
    real = read_engine._memory
    monkeypatch.setattr(read_engine, "_memory", lambda size: held.append(size) or real(size))
    wanted = Pieces("big", items["big"], 5, len(big) - 5)
    targets = [helpers.target(key, items[key], 0, 200_000, direct=True) for key in small]
    reads = [wanted.request, *(target.request for target in targets)]
    read_items(store, reads, threads=threads, max_inflight_bytes=limit)
    wanted.check(big, block_bytes(len(big)))
    assert sum(held) <= 2 * max(limit, 1 << 20), "a thread's buffer may have grown once"
    for target in targets:
        target.check(small[target.request.key])


@pytest.mark.parametrize("place", ["into", "piece"])
def test_an_error_in_any_thread_is_raised(store, helpers, written, monkeypatch, place):
    monkeypatch.setattr(read_plan, "STEP_BYTES", 1)
    _, items = written
    calls = []

    def piece(position, view):
        calls.append(position)
        if position > 700_000:
            raise KeyError("mine")

    item = items["t5"]
    changed = set()
    if place == "piece":
        with pytest.raises(KeyError, match="mine"):
            read_items(
                store, [ReadRequest("t5", item, 0, 1_500_000, None, None, piece)], threads=3, changed_keys=changed
            )
    else:
        helpers.flip(store, item.file, item.offset + item.lead + 800_000)
        target = helpers.target("t5", item, 0, 1_500_000, direct=True)
        with pytest.raises(CorruptCheckpointError, match="differ"):
            read_items(store, [target.request], threads=3, changed_keys=changed)
        assert target.seen == []
    assert changed == {"t5"}
    assert len(calls) < 20


def test_short_reads_are_continued(store, helpers, written, patch_os):
    data, items = written

    def short(fd, buffers, offset, flags=0):
        first = memoryview(buffers[0])
        return os.preadv(fd, [first[: max(1, len(first) // 3)]], offset, flags)

    patch_os(preadv=short)
    wanted = Pieces("t5", items["t5"], 0, 1_500_000)
    targets = [helpers.target(key, items[key], 0, items[key].stored_bytes, direct=True) for key in ("t2", "t4")]
    read_items(store, [wanted.request, *(target.request for target in targets)], threads=2)
    wanted.check(data["t5"], block_bytes(1_500_000))
    for target in targets:
        target.check(data[target.request.key])


def test_an_item_of_more_than_two_gib(store, monkeypatch):
    size = (2 << 30) + (5 << 20) + 3
    with open(os.path.join(store.path, "x"), "wb") as handle:
        handle.truncate(size)
        handle.seek(size - 4)
        handle.write(b"last")
    item = StoredItem("x", 0, size, 0, size, Framing.RAW)
    ends = []

    def piece(position, view):
        if position + len(view) == size:
            ends.append(bytes(view[-1:]))

    runs = Runs(1, 1, (2,), (size - 2,))
    sparse = read_items(store, [ReadRequest("k", item, 1, size, None, None, piece, runs)], threads=2)
    assert (ends, sparse.bytes_read) == ([b"t"], 2)
    lengths = []
    stats = read_items(store, [ReadRequest("k", item, 0, size, None, None, lambda _, view: lengths.append(len(view)))])
    assert (sum(lengths), stats.bytes_read) == (size, size)


def test_threads_must_be_positive(store):
    with pytest.raises(ValueError, match="threads=0"):
        read_items(store, [], threads=0)
    with pytest.raises(ValueError, match="max_inflight_bytes=0"):
        read_items(store, [], max_inflight_bytes=0)
    assert read_items(store, []).bytes_read == 0


def test_done_is_called_once_even_when_pieces_finish_at_once(store, written, monkeypatch):
    monkeypatch.setattr(read_plan, "STEP_BYTES", 1)
    data, items = written
    lock = threading.Lock()
    for _ in range(20):
        calls = []

        def done(view, calls=calls):
            with lock:
                calls.append(bytes(view) == data["t5"])

        into = memoryview(bytearray(len(data["t5"])))
        read_items(store, [ReadRequest("t5", items["t5"], 0, len(into), into, done)], threads=4)
        assert calls == [True]
