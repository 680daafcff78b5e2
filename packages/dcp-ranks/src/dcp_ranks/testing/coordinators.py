"""Coordinators of each kind for tests on several ranks, and signals between ranks that use no coordinator."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final
from unittest import mock

import torch.distributed as dist

from dcp_ranks.choose_coordinator import make_coordinator
from dcp_ranks.peers.options import PeerOptions
from dcp_ranks.peers.process_identity import own_identity
from dcp_ranks.phases.collective_coordinator import CollectiveCoordinator
from dcp_ranks.phases.coordinator import Coordinator
from dcp_ranks.phases.store_coordinator import StoreCoordinator
from dcp_ranks.streams.cards import host_hint
from dcp_ranks.testing.group_store import group_store, keys_of_group

__all__ = [
    "KINDS",
    "STORE_KINDS",
    "caught",
    "coordinator",
    "every_failure_is_heard",
    "hear",
    "leftover_keys",
    "pretended_host",
    "say",
]

STORE_KINDS: Final = ("store", "relay")
KINDS: Final = (*STORE_KINDS, "collective")
"""Kinds of coordinators for tests: `store`; `relay`, whose leaders relay messages, with two ranks per pretended host;
`collective`."""

_RELAYING = PeerOptions(leaders_above=1, fan_out=1)
_HEAR_SECONDS = 40.0
_LASTING = ("dcp/drawn/", "dcp/usable", "dcp/peers/")


def coordinator(kind: str, **options: Any) -> Coordinator:
    """Return a coordinator of the default process group, for a test.

    Args:
        kind: `store`; `relay`, whose leaders relay messages, with two ranks per pretended host; or `collective`.
        options: Keyword arguments of `make_coordinator`; for `collective`, of `CollectiveCoordinator`.

    Ranks: every rank must call this function.
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
    """Context manager: this rank acts as if it ran on another host; ranks with the same `name` share a host."""
    own, hint = own_identity(), host_hint()
    with (
        mock.patch("dcp_ranks.peers.monitor.own_identity", return_value=replace(own, host=f"{own.host}{name}")),
        mock.patch("dcp_ranks.streams.streams.host_hint", return_value=f"{hint}{name}"),
    ):
        yield


@contextlib.contextmanager
def every_failure_is_heard() -> Iterator[None]:
    """Context manager: errors of phases also name ranks that fail up to 60 s after the first rank, on every rank.

    Ranks: every rank must enter the block.
    """
    with contextlib.ExitStack() as stack:
        for module in ("store_phase", "tree_phase"):
            stack.enter_context(mock.patch(f"dcp_ranks.phases.{module}.GRACE_SECONDS", 60.0))
        yield


def leftover_keys() -> list[str]:
    """Return the keys that ended operations have left in the default group's store, which should be none.

    Ranks: every rank; collective.
    """
    dist.barrier()
    left = [key for key in keys_of_group() if "dcp/" in key]
    dist.barrier()
    return [key for key in left if not any(each in key for each in _LASTING)]


def caught(call: Callable[[], object]) -> BaseException | None:
    """Call the function `call`, and return the exception that it raises; None if it raises none."""
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - an interrupt is looked at, too
        return error
    return None


def say(word: object) -> None:
    """Send the signal named `word` to the ranks that wait for this signal in `hear`."""
    group_store().set(f"said {word}", "yes")


def hear(word: object) -> None:
    """Wait until another rank has sent the signal named `word` with `say`; fails after 40 s."""
    store = group_store()
    deadline = time.monotonic() + _HEAR_SECONDS
    while not store.check([f"said {word}"]):
        assert time.monotonic() < deadline, "no other rank came so far while this one was busy"
        time.sleep(0.01)
