from __future__ import annotations

import contextlib
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_manifest.pickles.pickle_table import (
    ForbiddenGlobalError,
    Function,
    PickleTable,
    Record,
    RecordClass,
)
from dcp_manifest.pickles.safe_pickle import read_pickle

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.binary(max_size=300),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner),
)


STAND_INS = {"m.Class": RecordClass("Class"), "m.sum": Function("sum", lambda _, arguments: sum(arguments))}


def find(path):
    if path not in STAND_INS:
        raise ForbiddenGlobalError(path)
    return STAND_INS[path]


TABLE = PickleTable(find)


@settings(deadline=None)
@given(PLAIN, st.sampled_from([3, 4, 5]))
def test_plain_data_is_read_as_pickle_reads_it(value, protocol):
    data = pickle.dumps(value, protocol=protocol)
    assert read_pickle(data + b"more", TABLE) == (value, len(data))


def test_shared_values_stay_shared():
    inner = [1]
    (first, second), _ = read_pickle(pickle.dumps((inner, inner)), TABLE)
    assert first is second


def test_records_and_calls():
    value, _ = read_pickle(b"\x80\x02cm\nClass\n)\x81}X\x01\x00\x00\x00acm\nsum\nK\x02K\x03\x86Rsb.", TABLE)
    assert isinstance(value, Record)
    assert (value.name, value.state) == ("Class", {"a": 5})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b".",
        b"\x80\x06N.",
        b"\x80\x04NN.",
        b"\x80\x04h\x05.",
        b"\x80\x04K",
        b"\x80\x04J\x01\x02\x03",
        b"\x80\x04j\x01\x02\x03",
        b"\x80\x04\x86.",
        b"\x80\x04t.",
        b"\x80\x04Na.",
        b"\x80\x04N]as.",
        b"\x80\x04}(]Nu.",
        b"\x80\x04}(Ku.",
        b"\x80\x04}]Ns.",
        b"\x80\x04}\x85K\x01s.",
        b"\x80\x04NN\x93.",
        b"\x80\x04cm\nClass",
        b"\x80\x04X\x01\x00\x00\x00\xff.",
        b"\x80\x04\xff.",
        b"\x80\x04G\x00\x00\x00.",
    ],
)
def test_what_is_no_pickle(data):
    with pytest.raises(ValueError, match=r"\(offset \d+\)$"):
        read_pickle(data, TABLE)


@settings(max_examples=500, deadline=None)
@given(st.lists(st.sampled_from([bytes([n]) for n in range(256)] + [b"cm\nClass\n", b"cm\nsum\n", b"h\x00"])))
def test_any_sequence_of_opcodes_ends_in_a_value_or_our_error(opcodes):
    with contextlib.suppress(ValueError):
        read_pickle(b"".join(opcodes), TABLE)
