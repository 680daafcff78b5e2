"""Coordinators of each kind for tests, and signals between ranks without a coordinator."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final
from unittest import mock

import torch.distributed as dist

from dcp_ranks.choose_coordinator import make_coordinator
from dcp_ranks.options import PeerOptions
from dcp_ranks.peers.roster import own_identity
from dcp_ranks.phases.collective_coordinator import CollectiveCoordinator
from dcp_ranks.phases.coordinator import Coordinator
from dcp_ranks.phases.store_coordinator import StoreCoordinator
from dcp_ranks.store_connections import borrow_store
from dcp_ranks.streams.cards import host_hint

__all__ = [
    "KINDS",
    "STORE_KINDS",
    "caught",
    "coordinator",
    "every_failure_is_heard",
    "group_store",
    "hear",
    "keys_of_group",
    "leftover_keys",
    "pretended_host",
    "say",
]

STORE_KINDS: Final = ("store", "relay")
KINDS: Final = (*STORE_KINDS, "collective")
"""Kinds of coordinators; `relay` has leaders that relay messages, and two ranks per pretended host."""

_RELAYING = PeerOptions(leaders_above=1, fan_out=1)
_HEAR_TIMEOUT_SECONDS = 40.0
_LASTING = ("dcp/drawn/", "dcp/usable", "dcp/peers/")


def coordinator(kind: str, **options: Any) -> Coordinator:
    """Return a coordinator of the default process group; `kind` is one of `KINDS`. Collective.

    `options` are those of `make_coordinator`, or of `CollectiveCoordinator` for `collective`.
    """
    if kind == "collective":
        return CollectiveCoordinator(**{"group": dist.group.WORLD, **options})
    if kind == "relay":
        with pretended_host(dist.get_rank() // 2):
            made = make_coordinator(peers=_RELAYING, **options)
        made.barrier("start")  # the first phase of an operation is never relayed through leaders
    else:
        made = make_coordinator(**options)
    assert type(made) is StoreCoordinator
    return made


@contextlib.contextmanager
def pretended_host(name: object) -> Iterator[None]:
    """Act as if this rank ran on another host; ranks with the same `name` share it."""
    own, hint = own_identity(), host_hint()
    with (
        mock.patch("dcp_ranks.peers.monitor.own_identity", return_value=replace(own, host=f"{own.host}{name}")),
        mock.patch("dcp_ranks.streams.streams.host_hint", return_value=f"{hint}{name}"),
    ):
        yield


@contextlib.contextmanager
def every_failure_is_heard() -> Iterator[None]:
    """Make phases report later failures, too, up to 60 s after the first. Every rank must enter the block."""
    with contextlib.ExitStack() as stack:
        for module in ("store_phase", "leaders"):
            stack.enter_context(mock.patch(f"dcp_ranks.phases.{module}.GRACE_SECONDS", 60.0))
        yield


def leftover_keys() -> list[str]:
    """Return keys that ended operations left in the default group's store. Collective."""
    dist.barrier()
    left = [key for key in keys_of_group() if "dcp/" in key]
    dist.barrier()
    return [key for key in left if not any(each in key for each in _LASTING)]


def caught(call: Callable[[], object]) -> BaseException | None:
    """Return the exception that `call` raises, or None."""
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - an interrupt is looked at, too
        return error
    return None


def say(word: object) -> None:
    """Send a signal to the ranks that wait in `hear`."""
    group_store().set(f"said {word}", "yes")


def hear(word: object) -> None:
    """Wait for a signal; fail after 40 s."""
    store = group_store()
    deadline = time.monotonic() + _HEAR_TIMEOUT_SECONDS
    while not store.check([f"said {word}"]):
        assert time.monotonic() < deadline, "no other rank came so far while this one was busy"
        time.sleep(0.01)


def group_store() -> Any:
    """Open a new connection to the default group's store."""
    group = dist.group.WORLD
    found = None if group is None else borrow_store(group)
    assert found is not None, "these ranks have no store"
    return found[0].underlying_store


def keys_of_group() -> list[str]:
    """Return all keys in the default group's store; none before torch 2.8, which cannot list keys."""
    store = group_store()
    return list(store.list_keys()) if hasattr(store, "list_keys") else []
