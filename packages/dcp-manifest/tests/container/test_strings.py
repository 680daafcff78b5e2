from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_manifest.container.strings import pack_strings, unpack_strings


@given(st.lists(st.text(st.characters(codec="utf-8") | st.just("\ud800"))))
def test_strings_survive(strings):
    text, lengths = pack_strings(strings)
    assert unpack_strings(text, lengths.astype(np.int64)) == strings


@pytest.mark.parametrize("lengths", [[1], [4], [2, 2], [2**62, 2**62, 2**62, 2**62, 3], []])
def test_lengths_must_add_up(lengths):
    with pytest.raises(ValueError, match="text"):
        unpack_strings(np.frombuffer(b"abc", np.uint8), np.array(lengths, np.int64))


def test_a_cut_through_a_character_is_refused():
    with pytest.raises(ValueError, match="decode"):
        unpack_strings(np.frombuffer("ß".encode(), np.uint8), np.array([1, 1]))
