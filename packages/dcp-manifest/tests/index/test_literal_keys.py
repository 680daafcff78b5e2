from __future__ import annotations

import enum
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_manifest.file.manifest_read import read_index
from dcp_manifest.file.manifest_write import encode
from dcp_manifest.index.literal_keys import LiteralKey

PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | st.binary(max_size=20)
KEYS = st.recursive(PLAIN, lambda keys: st.lists(keys | st.text(max_size=9), max_size=3).map(tuple), max_leaves=6)


class Colour(enum.IntEnum):
    RED = 1


class Name(str):
    __slots__ = ()


@given(KEYS)
def test_a_key_comes_back_bit_by_bit_or_is_no_literal(key):
    element = LiteralKey.of(key)
    if element is None:
        assert any(word in repr(key) for word in ("nan", "inf", "j"))  # what no literal says
    else:
        assert element == str(key)
        assert type(element.value) is type(key)
        assert repr(element.value) == repr(key)


@pytest.mark.parametrize("key", [7, -7, 0, 10**400, True, None, 1.5, -0.0, 1e300, 2j, b"x", (), (1, (2, "a")), ("a",)])
def test_literals(key):
    assert repr(LiteralKey.of(key).value) == repr(key)


@pytest.mark.parametrize(
    "key",
    ["a", Name("a"), Colour.RED, (1, Colour.RED), (Name("a"),), float("nan"), float("inf"), frozenset([1]), int, ...],
)
def test_what_is_no_literal(key):
    assert LiteralKey.of(key) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "007",
        "1_000",
        "a",
        "'a'",
        "[1]",
        "{1}",
        "1 + 1",
        "f()",
        "((",
        "1if",
        "\\d",
        "'\\d'",
        "nan",
        "True ",
        "٣",
        "--1",
    ],
)
def test_other_texts_stand_for_themselves(text):
    value = LiteralKey(text).value
    assert type(value) is str
    assert value == text


@pytest.mark.parametrize("text", ["(" * 4000, "9" * 4096, "-" * 4000 + "1", "1" + "0" * 10**6, "(" * 2000 + ")" * 2000])
def test_hostile_texts_cost_little_and_stand_for_themselves(text):
    began = time.process_time()
    assert LiteralKey(text).value == (int(text) if len(text) == 4096 else text)
    assert time.process_time() - began < 5


def test_numbers_longer_than_python_converts_are_refused():
    with pytest.raises(ValueError, match="digits"):
        LiteralKey.of(10 ** (sys.get_int_max_str_digits() + 1))


def test_keys_survive_in_an_index(rich):
    keys = (True, None, 1.5, (1, "a.b"), b"x", -3)
    rich.paths = {**rich.paths, "rng": tuple(map(LiteralKey.of, keys))}
    found = read_index(encode(rich), file=".metadata").paths["rng"]
    assert [element.value for element in found] == list(keys)
