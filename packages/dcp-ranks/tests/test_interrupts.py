"""Interrupts at any moment of an operation: no other rank waits for the one that was interrupted."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from unittest import mock

import pytest
import torch.distributed as dist

from dcp_ranks import make_coordinator
from dcp_ranks.errors import CheckpointException
from dcp_ranks.interrupts import interrupts_deferred
from dcp_ranks.phases.phases import check_fence
from dcp_ranks.phases.store_coordinator import StoreCoordinator
from integration_tests.kits.coordinators import coordinator, leftover_keys

OURS = os.path.join("src", "dcp_ranks") + os.sep


class Interrupt:
    """Raises KeyboardInterrupt at the n-th moment at which Python would run a signal's handler in our own code.

    Those are the entry of a function and the return of a call of C code.
    """

    def __init__(self, at):
        self.left = at

    def __enter__(self):
        self.before = signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)
        signal.signal(signal.SIGINT, self.before)

    def _look(self, frame, event, _):
        if event in ("call", "c_return") and OURS in frame.f_code.co_filename:
            self.left -= 1
            if self.left == 0:
                signal.getsignal(signal.SIGINT)(signal.SIGINT, frame)  # which may defer it


def phases(them):
    them.all_gather("gather", lambda: them.rank)
    them.reduce_scatter("scatter", lambda: them.rank, lambda values: values)
    them.barrier("end")


def interrupted(kind, who, moments):
    """How each operation ended on this rank, and whether the interrupt came before its end."""
    ends = []
    for at in moments:
        interrupt = Interrupt(at)
        end = "done"
        try:
            them = coordinator(kind, timeout_seconds=40.0)
            with them, interrupt if them.rank == who else contextlib.nullcontext():
                phases(them)
        except (KeyboardInterrupt, CheckpointException) as error:
            end = type(error).__name__
        ends.append(end if interrupt.left <= 0 or them.rank != who else "too late")
        with mock.patch.object(StoreCoordinator, "_check_waited_for", side_effect=AssertionError):
            check_fence()  # not that of the operation that was interrupted
        dist.barrier()
    return ends


# A coordinator that is interrupted while it hands an answer down is noticed after 30 s: see `relay_round`.
@pytest.mark.parametrize(("kind", "who"), [("store", 0), ("store", 1), ("relay", 1)])
def test_an_interrupt_at_any_moment_reaches_the_other_ranks(ranks, kind, who):
    ranks.run(1, dist.is_initialized, backend=None)  # a new group
    moments = [*range(1, 40), *range(40, 600, 7 if kind == "store" else 28)]
    found = ranks.run(2, interrupted, kind, who, moments)
    for mine, other in zip(found[who], found[1 - who], strict=True):
        # The others are done if they had all that they need of this rank.
        assert (mine, other) in {
            ("KeyboardInterrupt", "CheckpointException"),
            ("KeyboardInterrupt", "done"),
            ("too late", "done"),
        }
    assert found[1 - who][:40] == ["CheckpointException"] * 40


def signalled_while_drawing(who):
    """A signal comes while this rank's number is drawn: at the store, where no handler can run."""
    handled = []

    def handler(number, _):
        handled.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handler)
    draw = StoreCoordinator.draw

    def draw_and_be_signalled(store, rank):
        if rank == who:
            signal.raise_signal(signal.SIGINT)
        return draw(store, rank)

    StoreCoordinator.draw = staticmethod(draw_and_be_signalled)
    try:
        with make_coordinator(timeout_seconds=40.0) as them:
            phases(them)
        end = "done"
    except (KeyboardInterrupt, CheckpointException) as error:
        end = type(error).__name__
    finally:
        StoreCoordinator.draw = staticmethod(draw)
        signal.signal(signal.SIGINT, before)
    dist.barrier()
    with make_coordinator(timeout_seconds=40.0) as them:
        phases(them)
    return end, len(handled), leftover_keys()


@pytest.mark.parametrize("who", [0, 1])
def test_an_interrupt_while_a_number_is_drawn_reaches_the_other_ranks(ranks, who):
    found = ranks.run(2, signalled_while_drawing, who)
    assert found[who] == ("KeyboardInterrupt", 1, [])
    assert found[1 - who] == ("CheckpointException", 0, [])


def test_handlers_run_at_the_end_of_the_block_and_stay():
    handled = []
    before = signal.signal(signal.SIGTERM, lambda number, _: handled.append(number))
    try:
        with interrupts_deferred():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            assert handled == []
        assert handled == [signal.SIGTERM] * 2
        signal.raise_signal(signal.SIGTERM)
        assert len(handled) == 3
    finally:
        signal.signal(signal.SIGTERM, before)
