"""Deliveries: whatever is shared, and in whatever pieces it comes, every request gets its bytes, once, and checked."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcp_base.errors import DcpError
from dcp_io.reading.delivery import Delivery
from dcp_io.reading.read_engine import read_items
from dcp_io.requests import ReadRequest
from dcp_manifest.errors import CorruptCheckpointError
from dcp_manifest.index.columns import block_bytes
from dcp_manifest.index.runs import Runs

SIZES = [0, 1, 63, 70_000, 300_000, 1_500_000]  # of what `written` wrote
VERIFY = ["blocks", "full", True, False]


def rows(demands):
    """Return the demands as tuples: name, start, stop, grain."""
    columns = (demands.objects, demands.starts, demands.stops, demands.grains)
    return [
        (demands.names[number], *rest) for number, *rest in zip(*(column.tolist() for column in columns), strict=True)
    ]


def pieces(demands, dice):
    """Cut the demands at some of their grains: pieces as tuples name, start, stop, and whether they are shared."""
    often = dice.random()
    for name, start, stop, grain in rows(demands):
        cuts = sorted({start, stop, *(cut for cut in range(start, stop, grain or stop) if dice.random() < often)})
        for first, last in itertools.pairwise(cuts):
            yield name, first, last, dice.random() < 0.5


def deliver(store, delivery, dice, changed, *, checked):
    found = list(pieces(delivery.demands, dice))
    shared = {}
    for name, start, stop, is_shared in found:
        if is_shared:
            shared.setdefault(name, []).append((start, stop))
    alone = delivery.left_alone(shared)
    order = [(name, *each) for name, ranges in shared.items() for each in ranges]
    dice.shuffle(order)
    rest_first = dice.random() < 0.5
    if rest_first:
        read_items(store, alone, threads=2, changed_keys=changed)
    for name, start, stop in order:
        data = memoryview(store.read(name))[start:stop]
        is_checked = checked and delivery.check(name, start, data)
        delivery.take(name, start, data, checked=is_checked)
    if not rest_first:
        read_items(store, alone, changed_keys=changed)
    delivery.finish()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cuts=st.lists(
        st.tuples(st.sampled_from(range(len(SIZES))), st.floats(0, 1), st.floats(0, 1), st.booleans()), max_size=8
    ),
    verify=st.sampled_from(VERIFY),
    seed=st.integers(0, 2**32),
    checked=st.booleans(),
)
def test_any_ranges(store, helpers, written, cuts, verify, seed, checked):
    contents, items = written
    targets = []
    for number, one, two, direct in cuts:
        start, stop = sorted((int(one * SIZES[number]), int(two * SIZES[number])))
        targets.append((helpers.target(f"t{number}", items[f"t{number}"], start, stop, direct=direct), start, stop))
    changed = set()
    requests = [target.request for target, _, _ in targets]
    delivery = Delivery(requests, verify=verify, run_gap_bytes=100, changed_keys=changed)
    deliver(store, delivery, random.Random(seed), changed, checked=checked)
    for target, start, stop in targets:
        target.check(contents[target.request.key][start:stop])
    assert changed == {request.key for request in requests}


@pytest.mark.parametrize("gap", [1, 100_000])
def test_runs(store, written, gap):
    contents, items = written
    item, data = items["t5"], contents["t5"]
    runs = Runs(500, 1000, (7,), (200_000,))
    seen = {}
    finished = []
    request = ReadRequest(
        "t5", item, runs.start, runs.stop, None, finished.append, lambda at, view: seen.update({at: bytes(view)}), runs
    )
    delivery = Delivery([request], run_gap_bytes=gap)
    block = block_bytes(item.stored_bytes)
    wanted = {at // block for start in range(500, runs.stop, 200_000) for at in (start, start + 999)}
    assert delivery.demands.total_bytes == min(len(wanted) * block, item.stored_bytes)
    deliver(store, delivery, random.Random(1), set(), checked=True)
    assert len(finished) == 1
    for start in range(500, runs.stop, 200_000):
        assert any(at <= start and start + 1000 <= at + len(view) for at, view in seen.items())
    assert all(view == data[at : at + len(view)] for at, view in seen.items())


@pytest.mark.parametrize("direct", [True, False])
def test_damage_is_named_and_not_delivered(store, helpers, written, direct):
    contents, items = written
    item = items["t5"]
    target = helpers.target("t5", item, 0, item.stored_bytes, direct=direct)
    delivery = Delivery([target.request])
    base = item.offset + item.lead
    data = bytearray(contents["t5"])
    data[700_000] ^= 1
    for method in (delivery.check, lambda *piece: delivery.take(*piece, checked=False)):
        with pytest.raises(CorruptCheckpointError, match=rf"(?s)differ.*{item.file}.*'t5'") as caught:
            method(item.file, base, memoryview(data))
        assert caught.value.offset == base + 700_000 // block_bytes(item.stored_bytes) * block_bytes(item.stored_bytes)
    assert target.seen == []
    with pytest.raises(DcpError, match="did not get all of their bytes, the first for 't5'"):
        delivery.finish()


def test_only_crcs_at_borders_are_checked_in_advance(store, helpers, written):
    contents, items = written
    whole = dataclasses.replace(items["t4"], running_crcs=None)
    target = helpers.target("t4", whole, 0, whole.stored_bytes, direct=True)
    delivery = Delivery([target.request])
    base, data = whole.offset + whole.lead, memoryview(contents["t4"])
    assert not delivery.check(whole.file, base, data)
    delivery.take(whole.file, base + 100_000, data[100_000:], checked=True)
    damaged = bytearray(data[:100_000])
    damaged[1] ^= 1
    with pytest.raises(CorruptCheckpointError, match="'t4'"):
        delivery.take(whole.file, base, memoryview(damaged), checked=True)
    assert target.seen == []


def test_bytes_that_nobody_wants_pass_by(store, helpers, written):
    contents, items = written
    target = helpers.target("t4", items["t4"], 0, 10, direct=True)
    delivery = Delivery([target.request])
    assert not delivery.check("another file", 0, memoryview(b"abc"))
    delivery.take("another file", 0, memoryview(b"abc"), checked=True)
    deliver(store, delivery, random.Random(2), set(), checked=False)
    target.check(contents["t4"][:10])


def test_reads_that_check_everything_first_are_not_delivered_in_pieces():
    with pytest.raises(ValueError, match="read_items"):
        Delivery([], verify="before")
