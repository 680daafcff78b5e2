"""Pretended hosts: ranks of one machine that have folders of their own under the same path, and connect as hosts do."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from dcp_base import installed
from dcp_exchange import together
from dcp_io import KeepLast, LocalStore
from dcp_io.roots.copy_notes import HostCopies
from dcp_io.stores import host_store
from dcp_io.timed_call import TimedCall
from dcp_memory.partners import copying
from dcp_tiers import Tier, Tiers
from dcp_tiers.promote import promote
from dcp_tiers.promoter_process import PromoterProcess
from integration_tests.kits.shelves import ShelfPlugin

NEAR = "/near/run"
"""Path of the folder that each host has for itself."""
SHELF = "shelf://run"
"""URI of a store of each host that is no folder, whose objects are files in the folder at `NEAR`."""


def tiers_in(
    disks: str | Path, near: str = NEAR, *, keep: int = 2, copies: HostCopies | None = None, far: bool = True
) -> Tiers:
    """A tier of each host that keeps two checkpoints, and a tier that all hosts share."""
    tiers = [Tier(near, keep=KeepLast(keep), per_host=True, copies=copies), Tier(f"{disks}/far")]
    return Tiers(tiers if far else tiers[:1])


@contextlib.contextmanager
def without_promoter() -> Iterator[None]:
    """Context manager: managers start no process that promotes."""
    with mock.patch.multiple(PromoterProcess, start=mock.DEFAULT, wake=lambda _: True, end=lambda *_: True):
        yield


def promote_on(disks: str | Path, hosts: Sequence[str], near: str = NEAR) -> dict[str, list[int]]:
    """Promote on each host in turn, and again where it does not know what later ones brought; returns what lacks."""
    left: dict[str, list[int]] = {}
    for host in (*hosts, *hosts[:-1]):
        with on_host(disks, host):
            left = promote_once(tiers_in(disks, near))
    return left


def promote_once(tiers: Tiers) -> dict[str, list[int]]:
    """Promote what this host has, until nothing of it is on the way; returns what lacks other hosts' parts."""
    before: dict[str, list[int]] | None = None
    while (left := promote(tiers, progress_timeout_seconds=0.1)) != before:
        before = left
        for thread in threading.enumerate():
            if thread.name.startswith("dcp-tiers "):  # given up: the disk made no progress for a moment
                thread.join()
    return left


def folder_of(disks: str | Path, host: str, path: str) -> str:
    """The folder of a pretended host that a path of it names."""
    return f"{disks}/{host}{path}"


@contextlib.contextmanager
def on_host(disks: str | Path, host: str) -> Iterator[None]:
    """Context manager: this process is on a pretended host, whose disk is a folder."""
    folder = mock.patch.object(host_store, "host_folder", lambda path: folder_of(disks, host, path))
    with folder, mock.patch.dict(os.environ, DCP_SHELF_DIR=f"{disks}/{host}/near"):
        installed.register(ShelfPlugin(), name="shelves")
        try:
            yield
        finally:
            installed.unregister("shelves")


@contextlib.contextmanager
def job_on(disks: str | Path, hosts: Sequence[str]) -> Iterator[str]:
    """Context manager: the ranks are spread evenly over pretended hosts, in order; gives the name of this rank's."""
    each = dist.get_world_size() // len(hosts)
    host = hosts[dist.get_rank() // each]
    with on_host(disks, host), connected_as_hosts(len(hosts), each):
        yield host


@contextlib.contextmanager
def connected_as_hosts(count: int, each: int) -> Iterator[None]:
    """Context manager: so many ranks after another connect as those of one host, others as those of different ones."""
    grouped = tuple(tuple(range(start, start + each)) for start in range(0, count * each, each))
    apart = mock.patch.object(copying, "group_by_host", lambda proved: tuple((rank,) for rank in sorted(proved)))
    with mock.patch.object(together, "group_by_host", return_value=grouped), apart:
        yield


@contextlib.contextmanager
def reads_below(folder: str | Path) -> Iterator[list[tuple[str, int]]]:
    """Context manager: gives a list that gets the name and size of each read of a data file below a folder."""
    seen: list[tuple[str, int]] = []
    opened = LocalStore.open

    def open_(store: LocalStore, name: str) -> Any:
        source = opened(store, name)
        if not name.endswith(".distcp") or not store.path.startswith(f"{folder}/"):
            return source
        return _Counted(source, name, seen)

    with mock.patch.object(LocalStore, "open", open_):
        yield seen


@contextlib.contextmanager
def hangs_below(folder: str | Path) -> Iterator[None]:
    """Context manager: the storage of a folder answers nothing, and counts as silent soon."""
    ends = threading.Event()
    with (
        _before_below(folder, ("exists", "folders", "list", "open", "read", "size"), lambda _: ends.wait()),
        mock.patch.object(TimedCall, "SILENT_AFTER_SECONDS", 0.5),
    ):
        try:
            yield
        finally:
            ends.set()


@contextlib.contextmanager
def unwritable_below(folder: str | Path, number: int) -> Iterator[None]:
    """Context manager: nothing can be written below a folder, for the reason with an error number, such as ENOSPC."""

    def refuse(store: LocalStore) -> None:
        raise OSError(number, os.strerror(number), store.path)

    with _before_below(folder, ("create", "make", "publish", "touch"), refuse):
        yield


@contextlib.contextmanager
def _before_below(folder: str | Path, names: Sequence[str], act: Callable[[LocalStore], object]) -> Iterator[None]:
    """Context manager: a function is called before these methods of stores in a folder or below."""

    def after_act(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(store: LocalStore, *arguments: Any, **options: Any) -> Any:
            if f"{store.path}/".startswith(f"{folder}/"):
                act(store)
            return method(store, *arguments, **options)

        return call

    with mock.patch.multiple(LocalStore, **{name: after_act(getattr(LocalStore, name)) for name in names}):
        yield


class _Counted:
    """A source that notes what is read from it."""

    def __init__(self, source: Any, name: str, seen: list[tuple[str, int]]) -> None:
        self._source, self._name, self._seen = source, name, seen

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        self._seen.append((self._name, sum(map(len, buffers))))
        self._source.read_into(offset, buffers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)
