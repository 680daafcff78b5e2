from __future__ import annotations

import errno
import io
import itertools
import os
import threading
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcp_io.requests import Payload, WriteRequest
from dcp_io.saves.save_files import MARK_BYTES, data_mark
from dcp_io.stores.local_store import start_writeback
from dcp_io.writing import write_engine
from dcp_io.writing.write_engine import write_items
from dcp_manifest.index.columns import Framing, block_bytes, border_count

RNG = np.random.default_rng(0)
COUNTER = itertools.count()


def values(*sizes: int) -> dict[str, bytes]:
    return {f"t{n}": RNG.bytes(size) for n, size in enumerate(sizes)}


@pytest.fixture
def write(store, helpers):
    def write(data, *, framing=Framing.RAW, **options):
        make = helpers.raw_request if framing is Framing.RAW else helpers.object_request
        requests = [make(key, value) for key, value in data.items()]
        items = write_items(store, requests, **{"prefix": "__3_", "save_id": "abc", "sync": False, **options})
        return dict(zip(data, items, strict=True))

    return write


@pytest.mark.parametrize("layout", ["torch", "raw"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("single_file", [True, False])
def test_round_trip(store, helpers, write, monkeypatch, layout, threads, single_file):
    monkeypatch.setattr(write_engine, "FILE_MIN_BYTES", 1000)
    data = values(0, 1, 7, 63, 64, 65, 1000, 70_000, 300_000, (4 << 20) + 5, 3)
    items = write(data, layout=layout, threads=threads, single_file=single_file, sync=True)
    assert helpers.read_back(store, items, threads=2) == data
    names = {item.file for item in items.values()}
    assert names == set(helpers.names(store))
    assert len(names) == (threads if single_file else len(data))
    assert all(name.startswith("__3_") and name.endswith(".abc.distcp") for name in names)
    for key, item in items.items():
        assert item.crc32 == zlib.crc32(data[key])
        assert len(item.running_crcs) == border_count(len(data[key]))
        step = block_bytes(len(data[key]))
        assert item.running_crcs.tolist() == [
            zlib.crc32(data[key][: step * (n + 1)]) for n in range(len(item.running_crcs))
        ]
        if len(data[key]) >= 64:
            assert (item.offset + item.lead) % 64 == 0


@pytest.mark.parametrize("layout", ["torch", "raw"])
def test_items_and_zero_gaps_fill_the_file_exactly(store, write, layout):
    items = write(values(5, 64, 1, 100_000, 2_000_000, 0, 8), layout=layout)
    data = store.read("__3_0.abc.distcp")
    assert data[:MARK_BYTES] == data_mark("abc")
    position = MARK_BYTES
    for item in sorted(items.values(), key=lambda item: (item.offset, item.length)):
        assert 0 <= item.offset - position < 64
        assert data[position : item.offset] == bytes(item.offset - position)
        position = item.offset + item.length
    assert position == len(data)


def test_items_of_the_torch_layout_open_with_torch(store, write):
    torch = pytest.importorskip("torch", reason="torch.load is the reader")
    data = values(3, 200_000)
    for key, item in write(data).items():
        archive = store.read(item.file)[item.offset : item.offset + item.length]
        tensor = torch.load(io.BytesIO(archive), weights_only=True)
        assert bytes(tensor.numpy()) == data[key]


def test_small_raw_items_lie_side_by_side_at_their_element_size(store, helpers):
    requests = [helpers.raw_request(f"s{n}", RNG.bytes(4), "float32", ()) for n in range(1000)]
    requests.insert(0, helpers.raw_request("odd", b"x", "uint8"))
    items = write_items(store, requests, prefix="__0_", save_id="abc", layout="raw", sync=False)
    assert store.size("__0_0.abc.distcp") <= MARK_BYTES + 4 * 1000 + 8
    assert all(item.offset % 4 == 0 for item in items[1:])


def test_scalars_of_the_torch_layout_take_at_most_600_bytes(store, helpers):
    requests = [helpers.raw_request(f"s{n}", RNG.bytes(4), "float32", ()) for n in range(500)]
    write_items(store, requests, prefix="__0_", save_id="abc", sync=False)
    assert store.size("__0_0.abc.distcp") <= 600 * 500


@pytest.mark.parametrize("framing", [Framing.OBJECT, Framing.TORCH_ZIP])
@pytest.mark.parametrize("layout", ["torch", "raw"])
def test_archives_are_stored_as_they_are(store, write, framing, layout):
    requests = [
        WriteRequest("a", 3, lambda: Payload(b"abc", framing)),
        WriteRequest("b", 4, lambda: Payload(memoryview(b"defg"), framing)),
    ]
    items = write_items(store, requests, prefix="__0_", save_id="abc", layout=layout, sync=False)
    data = store.read("__0_0.abc.distcp")
    assert [data[item.offset :][: item.length] for item in items] == [b"abc", b"defg"]
    assert all(item.lead == 0 and item.framing is framing and item.length == item.stored_bytes for item in items)


def test_nothing_to_write_makes_no_file(store, write):
    assert write({}) == {}
    assert store.list() == []


def test_little_data_makes_one_file(store, write):
    write(values(*[10] * 50), threads=8)
    assert len(store.list()) == 1


def test_large_items_go_to_different_threads_and_the_rest_levels_the_load():
    requests = [WriteRequest(str(n), cost << 20, lambda: None) for n, cost in enumerate([1, 9, 2, 8, 3, 3])]
    buckets = write_engine.assign_to_threads(requests, 2)
    assert sorted(position for bucket in buckets for position in bucket) == list(range(6))
    assert [sum(requests[n].cost_bytes for n in bucket) >> 20 for bucket in buckets] == [13, 13]
    assert [bucket[0] for bucket in buckets] == [1, 3]


def test_each_item_is_resolved_once_and_only_when_its_turn_has_come(store, monkeypatch):
    monkeypatch.setattr(write_engine, "PACK_BYTES", 10)
    resolved = []

    def request(n):
        def resolve():
            resolved.append((n, sum(entry.bytes for entry in store.list())))
            return Payload(bytes(100), Framing.RAW, "uint8", (100,))

        return WriteRequest(str(n), 100 - n, resolve)

    write_items(store, [request(n) for n in range(4)], prefix="__0_", save_id="abc", layout="raw", sync=False)
    assert [n for n, _ in resolved] == [0, 1, 2, 3]
    assert [size for _, size in resolved] == sorted({size for _, size in resolved})


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (Payload(b"abc", Framing.RAW, "float32", (1,)), "'w' has 3 bytes; float32 of sizes .1,. takes 4"),
        (Payload(b"abc", Framing.RAW, None, (3,)), "names no dtype"),
        (Payload(b"abc", Framing.RAW, "float96", (2,)), "takes 2"),
        (Payload(b"abc", Framing.RAW, "qint8", (3,)), "qint8"),
        (Payload(memoryview(b"abcd").cast("H"), Framing.RAW, "uint8", (4,)), "contiguous bytes"),
        (Payload(memoryview(b"abcd")[::2], Framing.OBJECT), "contiguous bytes"),
    ],
)
def test_contradictory_payloads_are_refused_and_leave_nothing(store, payload, message):
    with pytest.raises(ValueError, match=message):
        write_items(store, [WriteRequest("w", 3, lambda: payload)], prefix="__0_", save_id="abc")
    assert store.list() == []


@pytest.mark.parametrize("options", [{"threads": 0}, {"layout": "zip"}])
def test_bad_options_are_refused(write, options):
    with pytest.raises(ValueError, match=r"thread_count=0|layout='zip'"):
        write(values(1), **options)


@pytest.mark.parametrize("single_file", [True, False])
def test_the_first_error_of_any_thread_stops_all_and_removes_everything(store, monkeypatch, single_file):
    monkeypatch.setattr(write_engine, "FILE_MIN_BYTES", 1)
    failed = threading.Event()
    calls = []

    def bad():
        failed.set()
        raise RuntimeError("no such value")

    def slow():
        failed.wait(60)
        calls.append(1)
        return Payload(bytes(10), Framing.RAW, "uint8", (10,))

    requests = [WriteRequest("bad", 10, bad)] + [WriteRequest(f"s{n}", 10, slow) for n in range(60)]
    with pytest.raises(RuntimeError, match="no such value"):
        write_items(store, requests, prefix="__0_", save_id="abc", threads=3, single_file=single_file)
    assert len(calls) < 60
    assert store.list() == []


@pytest.mark.parametrize("step", ["pwritev", "fsync", "open", "close"])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_full_disk_fails_the_write_and_leaves_nothing(store, helpers, patch_os, monkeypatch, step, threads):
    monkeypatch.setattr(write_engine, "FILE_MIN_BYTES", 1)
    calls = itertools.count()
    paths = set()

    def fail(*args, **kwargs):
        if step == "close":
            os.close(*args)
        if next(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return None if step == "close" else getattr(os, step)(*args, **kwargs)

    requests = [helpers.raw_request(f"t{n}", RNG.bytes(1000)) for n in range(9)]
    patch_os(**{step: fail})
    with pytest.raises(OSError, match="No space left") as caught:
        write_items(store, requests, prefix="__0_", save_id="abc", threads=threads, single_file=False)
    assert caught.value.errno == errno.ENOSPC
    assert store.list() == []
    assert not paths


def test_a_name_that_is_taken_is_left_alone(store, write):
    store.publish("__3_0.abc.distcp", b"somebody's")
    with pytest.raises(FileExistsError):
        write(values(10))
    assert store.read("__3_0.abc.distcp") == b"somebody's"


def test_everything_is_synced_before_it_returns(store, write, patch_os):
    synced = []
    names = {}

    def opened(path, flags, mode=0o777):
        fd = os.open(path, flags, mode)
        names[fd] = os.path.basename(path)
        return fd

    patch_os(open=opened, fsync=lambda fd: synced.append(names[fd]))
    write(values(10, 20), single_file=False, sync=True)
    assert set(synced[:-1]) == {"__3_0.abc.distcp", "__3_1.abc.distcp"}
    assert synced[-1] == "checkpoint"
    synced.clear()
    write(values(10), prefix="__4_", sync=False)
    assert synced == []


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(0, 300) | st.sampled_from([65_536, 65_537, 200_000]), max_size=20),
    layout=st.sampled_from(["torch", "raw"]),
    threads=st.integers(1, 4),
    pack=st.sampled_from([1, 100, 1 << 20]),
    step=st.sampled_from([4096, 70_000]),
)
def test_any_mixture_comes_back(store, helpers, write, monkeypatch, sizes, layout, threads, pack, step):
    with monkeypatch.context() as patch:
        patch.setattr(write_engine, "FILE_MIN_BYTES", 100)
        patch.setattr(write_engine, "PACK_BYTES", pack)
        patch.setattr(write_engine, "STEP_BYTES", step)
        data = values(*sizes)
        items = write(data, layout=layout, threads=threads, prefix=f"__{next(COUNTER)}_")
    assert helpers.read_back(store, items) == data


class Pieces:
    """Payload that is produced piece by piece in one reused buffer."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.nbytes = len(data)
        self.asked: list[int] = []

    def pieces(self, max_bytes):
        self.asked.append(max_bytes)
        buffer = bytearray(max_bytes)
        for start in range(0, len(self.data), max_bytes):
            part = self.data[start : start + max_bytes]
            buffer[: len(part)] = part
            yield memoryview(buffer)[: len(part)]


@pytest.mark.parametrize("layout", ["torch", "raw"])
def test_payloads_in_pieces_are_those_in_one(store, helpers, write, layout):
    data = values(10, 70_000, 5 << 20, 3, 300_000, 64 << 10)
    sources = {key: Pieces(value) for key, value in data.items()}

    def request(key):
        source = sources[key]
        return WriteRequest(key, source.nbytes, lambda: Payload(source, Framing.RAW, "uint8", (source.nbytes,)))

    requests = [request(key) for key in data]
    options = {"layout": layout, "threads": 2, "sync": False, "max_inflight_bytes": 20_000}
    items = write_items(store, requests, prefix="__0_", save_id="pieces", **options)
    whole = write(data, layout=layout, threads=2)
    for key, item in zip(data, items, strict=True):
        assert (item.crc32, item.stored_bytes, item.lead) == (
            whole[key].crc32,
            whole[key].stored_bytes,
            whole[key].lead,
        )
        assert item.running_crcs.tolist() == whole[key].running_crcs.tolist()
    assert helpers.read_back(store, dict(zip(data, items, strict=True))) == data
    assert {size for source in sources.values() for size in source.asked} == {10_000}


@pytest.mark.parametrize("sync", [True, False])
def test_disk_is_started_while_bytes_are_still_written(store, write, monkeypatch, sync):
    started = []
    monkeypatch.setattr("dcp_io.stores.local_store._SYNC_STEP_BYTES", 1 << 20)
    monkeypatch.setattr(
        "dcp_io.stores.local_store.start_writeback", lambda fd, offset, length: started.append((offset, length))
    )
    items = write(values(*[400_000] * 10, 9 << 20), layout="raw", sync=sync)
    if not sync:
        assert started == []
        return
    size = max(item.offset + item.length for item in items.values())
    assert [offset for offset, _ in started] == [
        sum(length for _, length in started[:number]) for number in range(len(started))
    ]
    assert size - sum(length for _, length in started) < (1 << 20) + write_engine.STEP_BYTES


def test_writeback_is_a_hint(tmp_path):
    start_writeback(-1, 0, 10)
    with open(tmp_path / "x", "wb") as file:
        file.write(b"data")
        file.flush()
        start_writeback(file.fileno(), 0, 4)
    assert (tmp_path / "x").read_bytes() == b"data"


@pytest.mark.timeout(1800)
@pytest.mark.slow
def test_items_over_two_gigabytes_and_writes_that_end_short(store, patch_os):
    """One call moves less than 2 GiB, and maybe fewer bytes than requested; all bytes must be written nevertheless."""
    data = np.zeros((2 << 30) + (5 << 20) + 3, np.uint8)
    data[:: 1 << 20] = np.arange(len(data[:: 1 << 20])) % 251
    calls = []

    def pwritev(fd, buffers, offset):
        calls.append(sum(map(len, buffers)))
        if len(calls) % 5 == 0:  # as a signal or a full queue does
            buffers = [memoryview(buffers[0])[: max(1, len(buffers[0]) // 3)]]
        return os.pwritev(fd, buffers, offset)

    patch_os(pwritev=pwritev)
    request = WriteRequest("t", data.nbytes, lambda: Payload(data.data, Framing.RAW, "uint8", data.shape))
    (item,) = write_items(store, [request], prefix="__0_", save_id="abc", sync=False)
    assert len(calls) > 500
    assert item.stored_bytes == data.nbytes
    assert item.crc32 == zlib.crc32(data)
    written = np.memmap(os.path.join(store.path, item.file), np.uint8, "r", item.offset + item.lead, data.shape)
    assert np.array_equal(written, data)
