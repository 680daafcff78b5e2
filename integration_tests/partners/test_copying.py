"""Copies of hosts' parts on the next hosts: what arrives, what is refused, and what a failure leaves."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest

from dcp_base import CheckpointEvent, installed
from dcp_io import LocalStore
from dcp_io.roots.copy_notes import CopyNote, JobHosts
from dcp_memory import partner
from dcp_memory.partners import copying, courier
from dcp_memory.partners.courier import PIECE_BYTES
from dcp_ranks import Stream
from integration_tests.kits.damage import flip

Make = Callable[[int], Any]


def names(hosts: Any, host: int, step: int = 1) -> set[str]:
    return {path.name for path in hosts.folder(host, step).glob("*.distcp")}


def same_bytes(hosts: Any, step: int = 1) -> bool:
    """Whether all files of one name have the same bytes on all hosts."""
    seen: dict[str, bytes] = {}
    for host in range(hosts.count):
        for path in hosts.folder(host, step).glob("*.distcp"):
            if seen.setdefault(path.name, path.read_bytes()) != path.read_bytes():
                return False
    return True


@pytest.mark.parametrize("count", [2, 3, 5])
def test_each_part_is_on_the_next_host(make_hosts: Make, count: int) -> None:
    hosts = make_hosts(count)
    parts = hosts.save(size=3 * PIECE_BYTES if count == 2 else 70_000)
    found = hosts.copy()
    assert all(one.protected for one in found)
    for host in range(count):
        before = (host - 1) % count
        assert names(hosts, host) == {*parts[host], *parts[before]}
        note = CopyNote.read(hosts.store(host))
        assert note.protected
        assert note.copies == {JobHosts(hosts.store(before).parent()).own_id(): tuple(sorted(parts[before]))}
        assert found[host].bytes_sent == sum((hosts.folder(host) / name).stat().st_size for name in parts[host])
    assert same_bytes(hosts)


def test_what_is_there_is_not_sent_again(make_hosts: Make) -> None:
    hosts = make_hosts(2)
    hosts.save()
    hosts.copy()
    assert [one.bytes_sent for one in hosts.copy()] == [0, 0]
    lost = next(iter(CopyNote.read(hosts.store(1)).names))
    size = (hosts.folder(1) / lost).stat().st_size
    (hosts.folder(1) / lost).write_bytes(b"what a crash has left")
    found = hosts.copy()
    assert [(one.protected, one.bytes_sent) for one in found] == [(True, size), (True, 0)]
    assert same_bytes(hosts)


def test_stores_on_one_machine_do_not_back_each_other_up(make_hosts: Make) -> None:
    hosts = make_hosts(2)
    parts = hosts.save()
    with mock.patch.object(copying, "group_by_host", lambda proved: (tuple(proved),)):
        found = hosts.copy()
    assert {one.reason for one in found} == {"all hosts' stores are on one machine"}
    assert [names(hosts, host) for host in range(2)] == [{*part} for part in parts]


def test_bytes_that_change_on_their_way_are_refused(make_hosts: Make) -> None:
    hosts = make_hosts(3)
    parts = hosts.save()
    send = Stream.send

    def damage(
        stream: Stream, message: bytes, payload: Sequence[memoryview] = (), descriptor: int | None = None
    ) -> None:
        if payload and len(payload[0]) > 50_000 and stream.rank == 1:
            changed = bytearray(payload[0])
            changed[len(changed) // 2] ^= 1
            payload = [memoryview(changed)]
        send(stream, message, payload, descriptor)

    with mock.patch.object(Stream, "send", damage):
        found = hosts.copy()
    assert {one.reason for one in found} == {found[0].reason}
    assert "a piece was changed on its way" in found[0].reason
    assert names(hosts, 1) == {*parts[1]}
    assert not any(CopyNote.read(hosts.store(host)).protected for host in range(3))
    assert all(one.protected for one in hosts.copy())


def test_a_damaged_part_is_not_copied(make_hosts: Make) -> None:
    hosts = make_hosts(2)
    parts = hosts.save()
    flip(hosts.folder(0) / parts[0][0], 50_000)
    found = hosts.copy()
    assert "differ from what was saved" in found[0].reason
    assert not names(hosts, 1) & {parts[0][0]}


def test_a_full_partner_gets_back_its_room(make_hosts: Make) -> None:
    hosts = make_hosts(2)
    parts = hosts.save()
    create = LocalStore.create
    made: list[str] = []

    def full(store: LocalStore, name: str, *, sync: bool = True) -> Any:
        if store.path == str(hosts.folder(1)) and name in parts[0]:
            made.append(name)
            if len(made) > 1:
                raise OSError(errno.ENOSPC, "No space left on device", name)
        return create(store, name, sync=sync)

    seen: list[CheckpointEvent] = []
    installed.divert_events(seen.append)
    try:
        with mock.patch.object(LocalStore, "create", full):
            found = hosts.copy()
    finally:
        installed.divert_events(None)
    assert "No space left on device" in found[0].reason
    assert names(hosts, 1) == {*parts[1]}
    assert CopyNote.read(hosts.store(1)).names == frozenset()
    ends = [(event.operation, event.state) for event in seen if event.state in ("finished", "failed")]
    assert ends == [("protect", "failed")] * 2


def test_a_crash_in_the_middle_leaves_the_earlier_step_protected(make_hosts: Make) -> None:
    hosts = make_hosts(2)
    hosts.save(1)
    assert all(one.protected for one in hosts.copy(1))
    parts = hosts.save(2)
    send_file = courier.Courier._send_file
    died = threading.Event()

    def die(self: Any, stream: Stream, number: int, name: str) -> None:
        if name == parts[1][1]:
            died.set()
            stream.lose("killed")
        send_file(self, stream, number, name)

    with mock.patch.object(courier.Courier, "_send_file", die):
        found = hosts.copy(2)
    assert died.is_set()
    assert found[0].reason is not None
    assert all(CopyNote.read(hosts.store(host, 1)).protected for host in range(2))
    assert not any(CopyNote.read(hosts.store(host, 2)).protected for host in range(2))
    assert same_bytes(hosts, 2)
    assert all(one.protected for one in hosts.copy(2))


def test_a_copy_that_is_given_up_ends_on_all_hosts(make_hosts: Make) -> None:
    hosts = make_hosts(3)
    parts = hosts.save(size=4 * PIECE_BYTES)
    hosts.cancelled = True
    assert all("given up" in one.reason for one in hosts.copy())
    assert [names(hosts, host) for host in range(3)] == [{*part} for part in parts]


def test_hosts_with_different_saves_of_a_step_copy_nothing(make_hosts: Make) -> None:
    hosts = make_hosts(2)
    hosts.save()
    index = (hosts.folder(0) / ".metadata").read_bytes()
    hosts.save()
    (hosts.folder(0) / ".metadata").write_bytes(index)
    assert all("different saves" in one.reason for one in hosts.copy())
    (hosts.folder(0) / ".metadata").unlink()
    assert all("rank 0: CheckpointNotFoundError" in one.reason for one in hosts.copy())


def test_a_step_of_which_a_host_has_lost_a_file_is_not_protected(make_hosts: Make) -> None:
    hosts = make_hosts(3)
    lost = hosts.save()[1][0]
    (hosts.folder(1) / lost).unlink()
    reason = f"no host has 1 of the files that it has written, such as {lost}"
    assert {copied.reason for copied in hosts.copy()} == {reason}
    assert not any(CopyNote.read(hosts.store(host)).protected for host in range(3))


def test_a_note_of_an_earlier_save_does_not_protect_a_later_one(make_hosts: Make) -> None:
    hosts = make_hosts(2)
    hosts.save()
    hosts.copy()
    note = CopyNote.read(hosts.store(0))
    (hosts.folder(0) / ".metadata").touch()
    assert CopyNote.read(hosts.store(0)) == note
    data = (hosts.folder(0) / ".dcp-copies.json").read_bytes()
    hosts.save()
    (hosts.folder(0) / ".dcp-copies.json").write_bytes(data)
    assert not CopyNote.read(hosts.store(0)).protected
    assert all(one.protected for one in hosts.copy())
    assert CopyNote.read(hosts.store(0)).save_id != note.save_id


def test_a_step_is_not_protected_any_more_when_a_job_has_lost_a_host(make_hosts: Make) -> None:
    hosts = make_hosts(3)
    hosts.save()
    hosts.copy()
    ids = [JobHosts(hosts.store(host).parent()).own_id() for host in range(3)]
    JobHosts(hosts.store(0).parent()).note([*ids, "another"])
    assert CopyNote.read(hosts.store(0)).protected
    JobHosts(hosts.store(0).parent()).note([*ids[:2], "another"])
    assert not CopyNote.read(hosts.store(0)).protected


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"copies": [], "protected": true}', b"\xff"])
def test_a_damaged_note_says_nothing(make_hosts: Make, data: bytes) -> None:
    hosts = make_hosts(1)
    hosts.save()
    (hosts.folder(0) / ".dcp-copies.json").write_bytes(data)
    assert CopyNote.read(hosts.store(0)) == CopyNote()


def test_a_rate_must_be_positive() -> None:
    with pytest.raises(ValueError, match="must be a positive number"):
        partner(0)
