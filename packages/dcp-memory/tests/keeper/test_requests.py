"""Requests that no client of this library sends: they are refused, and the keeper goes on with all that it has."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dcp_memory import keeper_status, start_keeper
from dcp_memory.client.link import Link
from dcp_memory.client.store import KeeperStore
from dcp_memory.control import KeeperStatus
from dcp_memory.keeper.requests import _REQUESTS
from dcp_memory.wire import EXTENT, HEAD, PAYLOAD_BYTES, VERSION, encode

MIB = 1 << 20
VALUES = [
    None, True, -1, 0, 1, 2, 4096, 4097, MIB, 1 << 40, 1 << 63, 1 << 64, 10**30, 1.5, -0.0, 1e300, float("inf"),
    float("nan"), "", "a", "/", "..", "a/../b", "\0", "\n", "\ud800", "x" * 5000, [], [1], [[]], [None], {}, {"a": 1},
]  # fmt: skip
FIELDS = [
    "key", "id", "ids", "nbytes", "segment", "segments", "device", "inode", "small", "size", "left", "folder",
    "prepare", "force",
]  # fmt: skip
PAYLOADS = [b"", b"x", bytes(23), EXTENT.pack(1, 0, 1), EXTENT.pack(1 << 63, 1 << 63, (1 << 64) - 1) * 3, bytes(5000)]


@pytest.fixture
def link(run: str, folder: Path) -> Iterator[Link]:
    start_keeper(run, max_bytes=64 * MIB)
    with closing(Link(str(folder), run)) as made:
        yield made


def status(run: str) -> KeeperStatus:
    found = keeper_status(run)
    assert found is not None
    return found


def raw(link: Link, fields: dict[str, Any], payload: bytes = b"") -> dict[str, Any]:
    """The answer to a request, whatever it says; an error ends neither the keeper nor the connection."""
    with link._lock:
        if link._socket is None:
            link._connect()
        answer = link._exchange(fields, payload)
    if answer.descriptor is not None:
        socket.close(answer.descriptor)
    return answer.fields


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 30))])
def test_random_requests_break_nothing(run: str, link: Link, seed: int) -> None:
    store, dice = KeeperStore(run, "kept"), random.Random(seed)
    store.publish("x", b"x" * 3 * MIB)
    pid, kinds = status(run).pid, sorted(_REQUESTS.keys() - {"stop"})
    known = [*VALUES]
    for _ in range(1500):
        fields = {name: dice.choice(known) for name in FIELDS if dice.random() < 0.8}
        fields["do"] = dice.choice([*kinds, *kinds, dice.choice(VALUES)])
        answer = raw(link, fields, dice.choice(PAYLOADS))
        # Numbers that the keeper has given are worth more than those that were made up.
        known += [answer[name] for name in ("id", "segment", "size") if name in answer] * 3
    assert store.read("x") == b"x" * 3 * MIB
    assert status(run).pid == pid


@pytest.mark.parametrize(
    ("fields", "payload"),
    [
        ({"small": False, "size": 0, "left": 0}, bytes(23)),
        ({"small": False, "size": 0, "left": 0, "key": 5}, b""),
        ({"small": False, "size": 1, "left": 0}, EXTENT.pack(1, 0, 1)),
        ({"small": False, "size": 0, "left": -4096}, b""),
        ({"small": False, "size": 0, "left": 1}, b""),
        ({"small": False, "size": "nan", "left": 0}, b""),
        ({"small": False}, b""),
    ],
)
def test_wrong_commits_leave_no_memory_in_use(run: str, link: Link, fields: dict[str, Any], payload: bytes) -> None:
    number = raw(link, {"do": "create", "key": "folder/name"})["id"]
    while raw(link, {"do": "extend", "id": number, "nbytes": 100_000}).get("wait"):
        pass
    raw(link, {"do": "commit", "id": number, **fields}, payload)
    raw(link, {"do": "drop", "id": number})
    for name in KeeperStore(run).child("folder").list():
        KeeperStore(run).child("folder").delete(name.name)
    KeeperStore(run).delete("5")
    found = status(run)
    assert (found.used_slab_bytes, found.objects, found.bytes) == (0, 0, found.slab_bytes)


def greeted(folder: Path, run: str) -> socket.socket:
    """A connection whose client has said what it is."""
    made = socket.socket(socket.AF_UNIX)
    made.connect(str(folder / f"{run}.sock"))
    made.settimeout(20)
    made.sendall(encode({"do": "greet", "version": VERSION}))
    assert made.recv(4096)
    return made


@pytest.mark.parametrize(
    "data",
    [
        b"G" * 100,
        HEAD.pack(b"DCPK", VERSION, 0, 1 << 20, PAYLOAD_BYTES + 1),
        HEAD.pack(b"DCPK", VERSION, 0, (1 << 32) - 1, 0),
        HEAD.pack(b"DCPK", VERSION, 7, 2, 0) + b"{}",
        HEAD.pack(b"DCPK", VERSION + 1, 0, 2, 0) + b"{}",
        HEAD.pack(b"DCPK", VERSION, 0, 2, 0) + b"[]",
        HEAD.pack(b"DCPK", VERSION, 0, 3, 0) + b"\xff\xfe{",
        HEAD.pack(b"DCPK", VERSION, 0, 0, 0),
        HEAD.pack(b"DCPK", VERSION, 0, 60_000, 0) + b"[" * 60_000,
        HEAD.pack(b"DCPK", VERSION, 0, 6000, 0) + b'{"do":' + b"1" * 5993 + b"}",
    ],
    ids=str,
)
def test_what_is_no_frame_ends_its_connection_alone(run: str, folder: Path, data: bytes) -> None:
    store = KeeperStore(run)
    store.publish("x", b"1")
    with greeted(folder, run) as client:
        client.sendall(data)
        with contextlib.suppress(ConnectionResetError):  # not all was read
            assert client.recv(1) == b""
    assert store.read("x") == b"1"


def test_frames_that_end_anywhere_leave_nothing(run: str, folder: Path) -> None:
    """Clients that close in the middle of a request, at each byte; one with a huge payload that never comes."""
    store = KeeperStore(run)
    store.publish("x", b"1")
    before = status(run)
    frame = encode({"do": "publish", "key": "y"}, 40) + bytes(40)
    for length in range(len(frame)):
        with greeted(folder, run) as client:
            client.sendall(frame[:length])
    waiting = [greeted(folder, run) for _ in range(20)]
    for client in waiting:
        client.sendall(encode({"do": "publish", "key": "y"}, PAYLOAD_BYTES) + bytes(10))
    assert store.read("x") == b"1"
    resident = int(Path(f"/proc/{before.pid}/statm").read_text().split()[1]) * 4096
    assert resident < 200 * MIB
    for client in waiting:
        client.close()
    while (after := status(run)).clients > before.clients:
        pass
    assert (after.objects, after.bytes) == (before.objects, before.bytes)


def test_a_client_that_reads_no_answers_holds_up_nobody(run: str, folder: Path) -> None:
    """Nor does one that sends requests without waiting for answers."""
    store = KeeperStore(run)
    store.publish("x", b"1" * 100_000)
    with greeted(folder, run) as client:
        client.setblocking(False)
        ask = encode({"do": "open", "key": "x"})
        with contextlib.suppress(BlockingIOError):
            while True:
                client.sendall(ask * 100)
        for _ in range(20):
            assert store.size("x") == 100_000
    assert store.read("x") == b"1" * 100_000
