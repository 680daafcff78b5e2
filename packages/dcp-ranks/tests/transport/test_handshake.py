"""Two ranks that know one secret find each other; nobody else gets in, and nobody else is believed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_ranks.transport.handshake import Call, Listener, new_challenge

SECRET, CHALLENGE = b"secret of the job", bytes(range(32))


def test_both_are_believed():
    call = Call(SECRET, CHALLENGE, 3)
    welcome = Listener(SECRET, CHALLENGE).answer(call.hello, 3)
    assert welcome is not None
    assert call.is_answered_by(welcome)


@pytest.mark.parametrize(
    ("call", "rank"),
    [
        (Call(b"another", CHALLENGE, 3), 3),
        (Call(SECRET, new_challenge(), 3), 3),  # meant for another listener
        (Call(SECRET, CHALLENGE, 3), 4),  # of another rank than it says
    ],
    ids=["secret", "challenge", "rank"],
)
def test_who_lacks_something_is_a_stranger(call, rank):
    assert Listener(SECRET, CHALLENGE).answer(call.hello, rank) is None


def test_a_greeting_is_good_for_once():
    call, listener = Call(SECRET, CHALLENGE, 3), Listener(SECRET, CHALLENGE)
    assert listener.answer(call.hello, 3) is not None
    assert listener.answer(call.hello, 3) is None


def test_an_answer_is_good_for_one_call():
    first, second = Call(SECRET, CHALLENGE, 3), Call(SECRET, CHALLENGE, 3)
    welcome = Listener(SECRET, CHALLENGE).answer(first.hello, 3)
    assert welcome is not None
    assert not second.is_answered_by(welcome)
    assert not first.is_answered_by(first.hello[32:])  # what was sent is not an answer


@given(st.binary(max_size=300))
def test_noise_is_neither_a_greeting_nor_an_answer(data):
    assert Listener(SECRET, CHALLENGE).answer(data, 0) is None
    assert not Call(SECRET, CHALLENGE, 0).is_answered_by(data)


def test_the_secret_is_in_nothing_that_is_sent():
    call = Call(SECRET, CHALLENGE, 3)
    welcome = Listener(SECRET, CHALLENGE).answer(call.hello, 3) or b""
    assert SECRET not in call.hello + welcome
    assert CHALLENGE not in call.hello + welcome
    assert len({Call(SECRET, CHALLENGE, 3).hello for _ in range(100)}) == 100
