"""Messages there and back, and bytes that are none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_exchange.transfer import Kind, Message, decode, encode

NUMBER = st.integers(0, 2**32 - 1)


@given(
    st.builds(
        Message,
        kind=st.sampled_from(Kind),
        piece=st.integers(0, 2**64 - 1),
        slot=NUMBER,
        origin=NUMBER,
        checked=st.booleans(),
        text=st.text(),
    )
)
def test_a_message_comes_as_it_was_sent(message: Message) -> None:
    assert decode(encode(message)) == message


def test_text_of_errors_may_hold_what_is_no_text() -> None:
    assert decode(encode(Message(Kind.STOP, text="file \udcff"))).text == "file ?"


WHOLE = encode(Message(Kind.READY, 7, 3))


@pytest.mark.parametrize("data", [b"", WHOLE[:-1], b"\xff" + WHOLE[1:], WHOLE + b"\xff"])
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="Kind" if data[:1] == b"\xff" else "is no message of an exchange"):
        decode(data)


@given(st.binary(max_size=40))
def test_no_bytes_do_anything_else(data: bytes) -> None:
    try:
        message = decode(data)
    except ValueError:
        return
    assert encode(message)[:17] == data[:17]
