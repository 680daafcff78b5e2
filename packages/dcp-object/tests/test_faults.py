"""Effect of each fault: a bounded number of retries, no partial writes, and an error that says what to do."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from dcp_core import CorruptCheckpointError, load, save
from dcp_io import StorageError, open_store, verify_checkpoint
from dcp_io.testing.folder import read_range
from dcp_object import ObjectStoreReader, ObjectStoreWriter
from dcp_object.opening import open_store as open_object_store
from dcp_object.store import ObjectStore
from integration_tests.kits.fault_proxy import Fault, FaultProxy
from integration_tests.kits.raw_bucket import RawBucket
from integration_tests.kits.s3_server import S3Server

SECRET = "not-to-be-shown-anywhere"
FAST = {
    "max_retries": 3,
    "retry_timeout": timedelta(seconds=20),
    "backoff": {"init_backoff": timedelta(milliseconds=10), "max_backoff": timedelta(milliseconds=50), "base": 2},
}
MAX_REQUESTS = (FAST["max_retries"] + 1) * 4  # type: ignore[operator]


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(s3.url) as proxy:
        yield proxy


@pytest.fixture
def folder(s3: S3Server, request: pytest.FixtureRequest) -> str:
    return f"s3://{s3.bucket}/faults/{abs(hash(request.node.name))}"


def options(proxy: FaultProxy) -> dict[str, Any]:
    return {"endpoint": proxy.url, "secret_access_key": SECRET, "retry_config": FAST}


def store(proxy: FaultProxy, folder: str, **given: Any) -> ObjectStore:
    return open_object_store(folder, storage_options=options(proxy), **given)


def first(count: int, fault: Fault, method: str) -> Callable[[str, str], Fault | None]:
    """Return a `decide` function by which the first `count` requests of a method meet a fault."""
    left = [fault] * count
    return lambda asked, path: left.pop() if asked == method and left else None


def always(fault: Fault, method: str) -> Callable[[str, str], Fault | None]:
    return lambda asked, path: fault if asked == method else None


@pytest.mark.parametrize("fault", ["503", "503 after", "drop", "drop after", "slow"])
@pytest.mark.parametrize("count", [1, 2])
def test_publishing_survives(proxy: FaultProxy, folder: str, fault: Fault, count: int) -> None:
    target = store(proxy, folder)
    for old in (None, b"old"):
        if old is not None:
            target.publish("x", old)
        proxy.decide = first(count, fault, "PUT")
        target.publish("x", b"new")
        assert target.read("x") == b"new"


@pytest.mark.parametrize("fault", ["503", "503 after", "drop", "drop after"])
@pytest.mark.parametrize("size", [10, 6 << 20])
def test_creating_survives_and_stays_exclusive(proxy: FaultProxy, folder: str, fault: Fault, size: int) -> None:
    target = store(proxy, folder, part_bytes=5 << 20)
    data = bytes(range(251)) * (size // 251 + 1)
    proxy.decide = first(1, fault, "PUT")
    sink = target.create("x")
    sink.write([data])
    sink.close()
    assert target.read("x") == data
    with pytest.raises(FileExistsError):
        target.create("x")


@pytest.mark.parametrize("fault", ["503", "drop", "truncate", "slow"])
def test_reading_survives(proxy: FaultProxy, folder: str, fault: Fault) -> None:
    target = store(proxy, folder)
    data = bytes(range(256)) * 4000
    target.publish("x", data)
    for count in (1, 2):
        proxy.decide = first(count, fault, "GET")
        assert target.read("x") == data
        proxy.decide = first(count, fault, "GET")
        buffer = bytearray(500_000)
        read_range(target, "x", 1000, memoryview(buffer))
        assert buffer == data[1000:501_000]


@pytest.mark.parametrize("fault", ["503", "drop", "truncate"])
def test_reading_gives_up(proxy: FaultProxy, folder: str, fault: Fault) -> None:
    target = store(proxy, folder)
    target.publish("x", b"0123456789" * 100)
    proxy.decide = always(fault, "GET")
    before = proxy.requests["GET"]
    with pytest.raises(StorageError, match=r"GET s3://.*/x: failed after \d attempts in .*; check the connection"):
        read_range(target, "x", 0, memoryview(bytearray(100)))
    assert 2 <= proxy.requests["GET"] - before <= MAX_REQUESTS


@pytest.mark.parametrize("method", ["PUT", "POST"])
def test_a_save_that_cannot_write_leaves_the_old_checkpoint(proxy: FaultProxy, folder: str, method: str) -> None:
    writer = ObjectStoreWriter(folder, storage_options=options(proxy), thread_count=1, max_inflight_bytes=30 << 20)
    save({"w": torch.ones(3_000_000)}, storage_writer=writer)
    before = sorted(entry.name for entry in open_store(folder).list())

    def refuse(asked: str, path: str) -> Fault | None:
        return "503" if asked == method and ".distcp" in path else None

    proxy.decide = refuse
    with pytest.raises(StorageError, match="failed after"):
        save({"w": torch.zeros(3_000_000)}, checkpoint_id=folder, storage_writer=writer)
    proxy.decide = lambda asked, path: None
    template = {"w": torch.zeros(3_000_000)}
    load(template, checkpoint_id=folder)
    assert template["w"].sum() == 3_000_000
    assert verify_checkpoint(open_store(folder)).ok
    save({"w": torch.zeros(3_000_000)}, checkpoint_id=folder)  # by its id, past the proxy
    assert len(open_store(folder).list()) == len(before)


def test_credentials_are_never_told(
    proxy: FaultProxy, folder: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    writer = ObjectStoreWriter(folder, storage_options=options(proxy))
    reader = ObjectStoreReader(folder, storage_options=options(proxy))
    save({"w": torch.ones(3)}, storage_writer=writer)
    told = [repr(writer), repr(reader), str(writer._backend)]
    proxy.decide = always("503", "GET")
    with pytest.raises(StorageError) as caught:
        load({"w": torch.ones(3)}, storage_reader=reader)
    told += traceback.format_exception(caught.value)
    with pytest.raises(ValueError, match="cannot be opened") as wrong:
        open_object_store(folder, storage_options={"secret_access_key": SECRET, "no_such_option": "1"})
    told += traceback.format_exception(wrong.value)
    for text in (f"s3://key:{SECRET}@bucket/x", f"s3://bucket/x?secret={SECRET}"):
        with pytest.raises(ValueError, match="storage_options") as refused:
            open_object_store(text)
        told.append(str(refused.value))
    told += [caplog.text, *capfd.readouterr()]
    assert not [text for text in told if SECRET in text]


def test_wrong_credentials_and_buckets_are_told_at_once(proxy: FaultProxy) -> None:
    before = proxy.requests.total()
    with pytest.raises(StorageError, match=r"s3://no-such-bucket/x.*check (endpoint|the credentials)"):
        store(proxy, "s3://no-such-bucket/x").publish("y", b"")
    assert proxy.requests.total() - before <= 6


def test_giving_up_leaves_no_upload_behind(s3: S3Server, proxy: FaultProxy, folder: str) -> None:
    target = store(proxy, folder, part_bytes=5 << 20)
    sink = target.create("x")
    sink.write([bytes(12 << 20)])
    sink.abort()
    assert target.list() == []
    assert RawBucket(s3, target.url.partition(f"{s3.bucket}/")[2]).uploads() == []


def test_damage_is_not_taken_for_a_fault(proxy: FaultProxy, folder: str) -> None:
    target = store(proxy, folder)
    target.publish("x", b"0123456789")
    before = proxy.requests["GET"]
    with pytest.raises(CorruptCheckpointError):
        read_range(target, "x", 5, memoryview(bytearray(10)))
    assert proxy.requests["GET"] - before <= 1


def test_data_can_be_spread_over_prefixes(folder: str) -> None:
    state = {f"w{number}": torch.full((200_000,), float(number)) for number in range(40)}
    for _ in range(2):
        save(state, storage_writer=ObjectStoreWriter(folder, spread=16, thread_count=4))
        names = [entry.name for entry in open_store(folder).list()]
        data = [name for name in names if name.endswith(".distcp")]
        assert all(name.startswith("~") for name in data)
        assert len({name.partition("/")[0] for name in data}) > 1
        assert len(names) == len(data) + 1
        assert open_store(folder).folders() == ()
    template = {key: torch.zeros_like(value) for key, value in state.items()}
    load(template, checkpoint_id=folder)
    assert all(torch.equal(template[key], value) for key, value in state.items())
    assert verify_checkpoint(open_store(folder)).ok


def test_many_small_values_take_few_requests(proxy: FaultProxy, folder: str) -> None:
    state = {f"w{number}": torch.full((10,), float(number)) for number in range(2000)}
    save(state, storage_writer=ObjectStoreWriter(folder, storage_options=options(proxy)))
    before, given = proxy.requests["GET"], proxy.bytes_given
    template = {key: torch.zeros_like(value) for key, value in state.items()}
    report = load(template, storage_reader=ObjectStoreReader(folder, storage_options=options(proxy)))
    assert all(torch.equal(template[key], value) for key, value in state.items())
    assert proxy.requests["GET"] - before <= 8  # a listing or two, the index, and what 1 MB of data takes
    assert proxy.bytes_given - given <= 2 * report.bytes_read
