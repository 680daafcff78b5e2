from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_io.saves.save_files import (
    FoundMarker,
    Marker,
    belongs_to,
    check_save_id,
    find_markers,
    marker_name,
    this_process,
)
from dcp_io.stores.store import Entry

MARKER = Marker("abc", None, this_process(), "saving", 5, ("__0_0.old.distcp",))


@pytest.mark.parametrize("rank", [None, 0, 12])
def test_round_trip(store, rank):
    marker = dataclasses.replace(MARKER, rank=rank)
    store.publish(marker.name, marker.to_bytes())
    (found,) = find_markers(store, store.list())
    assert found.marker == marker
    assert found.entry.name == marker_name("abc", rank)


def test_what_a_marker_says_can_be_read_by_people():
    values = json.loads(MARKER.to_bytes())
    assert values["process"]["pid"] == this_process().pid
    assert values["process"]["host"] == this_process().host
    assert values["replaced"] == ["__0_0.old.distcp"]


@given(st.binary(max_size=100))
def test_damaged_markers_keep_their_id_and_stay_in_force(data):
    marker = Marker.from_bytes(".dcp-save-abc.r3", data)
    assert marker in (Marker("abc", 3, None, "saving"), Marker("abc", 3, None, "saving", torn=True))


@pytest.mark.parametrize(
    "change", [{"process": None}, {"phase": "dancing"}, {"replaced": 5}, {"started_ns": "soon"}, {"process": []}]
)
def test_half_damaged_markers_are_damaged(change):
    data = json.dumps({**json.loads(MARKER.to_bytes()), **change}).encode()
    assert Marker.from_bytes(MARKER.name, data).process is None


def test_other_names_are_no_markers(store):
    for name in (".dcp-save-", "x.dcp-save-abc", ".dcp-save-abc.tmp", ".dcp-save-abc.rx", ".metadata"):
        store.publish(name, b"")
    assert find_markers(store, store.list()) == []
    with pytest.raises(ValueError, match="not the name"):
        Marker.from_bytes(".metadata", b"")


def test_a_marker_that_vanishes_while_we_look(store):
    assert find_markers(store, [Entry(".dcp-save-abc", 1, 0.0)]) == []


ELSEWHERE = dataclasses.replace(this_process(), host="elsewhere")
GONE = dataclasses.replace(this_process(), start_ticks=1)


@pytest.mark.parametrize(
    ("process", "phase", "age", "dead"),
    [
        (this_process(), "saving", 0, False),
        (this_process(), "saving", 101, True),
        (ELSEWHERE, "saving", 99, False),
        (ELSEWHERE, "starting", 101, True),
        (ELSEWHERE, "ended", 0, True),
        (GONE, "saving", 0, True),
        (None, "saving", 99, False),
        (None, "saving", 101, True),
    ],
)
def test_when_a_save_counts_as_dead(process, phase, age, dead):
    marker = dataclasses.replace(MARKER, process=process, phase=phase)
    found = FoundMarker(marker, Entry(marker.name, 1, 1000.0))
    assert found.is_dead(now=1000.0 + age, stale_after_seconds=100.0) is dead


@pytest.mark.parametrize("save_id", ["", "a.b", "a/b", "ä", "x" * 65, "a b"])
def test_ids_that_cannot_be_in_names_are_refused(save_id):
    with pytest.raises(ValueError, match="save id"):
        check_save_id(save_id)


@pytest.mark.parametrize(
    ("name", "belongs"),
    [
        ("__0_0.abc.distcp", True),
        ("__0.abc.metadata", True),
        ("..metadata.abc.1234.tmp", True),
        ("__0_0.abcd.distcp", False),
        ("__0_0.distcp", False),
        (".metadata", False),
        (".dcp-save-abc", False),
        (".dcp-save-abc.r1", False),
    ],
)
def test_names_tell_whose_they_are(name, belongs):
    assert belongs_to(name, "abc") is belongs
