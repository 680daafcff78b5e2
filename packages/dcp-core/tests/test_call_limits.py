"""Objects that would take far more memory, or time, than they have bytes: refused before anything is made."""

from __future__ import annotations

import collections
import decimal
import fractions
import io
import pickle
from typing import Any

import numpy as np
import pytest

from dcp_core.object_globals import allowed_globals
from dcp_core.restricted_pickle import RestrictedUnpickler

HUGE = 1 << 36


class Call:
    """Pickles as a call."""

    def __init__(self, func: Any, *arguments: Any) -> None:
        self.reduced = func, arguments

    def __reduce__(self) -> Any:
        return self.reduced


def load(data: bytes) -> Any:
    allowed = allowed_globals()
    return RestrictedUnpickler(io.BytesIO(data), allowed=allowed.by_name, callables=allowed.callables).load()


BOMBS = {
    "bytes": Call(bytes, HUGE),
    "bytearray": Call(bytearray, HUGE),
    **{
        f"{kind.__name__} of a range": Call(kind, Call(range, HUGE))
        for kind in (list, tuple, set, frozenset, collections.deque, collections.Counter, dict, str)
    },
    "numpy of a range": Call(np.float64, Call(range, HUGE)),
    "fraction": Call(fractions.Fraction, "1e999999999"),
    "fraction of a decimal": Call(fractions.Fraction, Call(decimal.Decimal, "1E+999999999")),
    "integer of a decimal": Call(int, Call(decimal.Decimal, "1e999999999")),
    "numpy of a decimal": Call(np.int64, Call(decimal.Decimal, "1e999999999")),
}


@pytest.mark.parametrize("name", BOMBS)
def test_much_of_little_is_refused(name: str) -> None:
    with pytest.raises(pickle.UnpicklingError, match="not allowed"):
        load(pickle.dumps(BOMBS[name]))


def test_copies_of_copies_are_refused() -> None:
    """Each call is harmless; a thousand copies of a long list are not."""
    long = [*range(20_000)]
    with pytest.raises(pickle.UnpicklingError, match="more than its"):
        load(pickle.dumps([Call(tuple, long) for _ in range(1000)]))


def test_what_values_need_is_allowed() -> None:
    values = [
        set(range(50_000)), frozenset("abc"), collections.Counter("aab"), collections.deque(range(9), 5),
        collections.OrderedDict(a=1), collections.defaultdict(list, {"a": [1]}), bytearray(b"x" * 100_000), range(HUGE),
        fractions.Fraction(1, 3), decimal.Decimal("1E+99999"), np.float32(3.5), np.arange(3), 1 << 4000,
        b"b" * 3_000_000,
    ]  # fmt: skip
    for protocol in (2, 4):
        for value, found in zip(values, load(pickle.dumps(values, protocol)), strict=True):
            assert type(found) is type(value)
            assert np.array_equal(found, value) if isinstance(value, np.ndarray) else found == value


def test_a_length_is_not_believed() -> None:
    with pytest.raises(pickle.UnpicklingError, match="truncated"):
        load(b"\x80\x05\x96" + (1 << 34).to_bytes(8, "little") + b"abc.")
    assert load(pickle.dumps(bytearray(b"abc" * 99), protocol=5)) == bytearray(b"abc" * 99)
