"""Handshake that authenticates two ranks of the same job to each other over a TCP connection.

All ranks share a secret through the group's store; over connections they send only authentication codes (HMAC) of
random numbers. The listener publishes a random number, the challenge, in the store. The caller (the connecting rank)
sends a random number of its own with an HMAC of both numbers, and the listener answers with another HMAC: each proves
that the sender knows the secret. This module opens no connection, and does not encrypt later messages.
"""

from __future__ import annotations

import hmac
import os

__all__ = ["Call", "Listener", "new_challenge"]

_NONCE_BYTES = 32
_CODE = "sha256"


def new_challenge() -> bytes:
    """Return a challenge: random bytes for one listener, which the listener publishes in the store."""
    return os.urandom(_NONCE_BYTES)


class Call:
    """The connecting rank's side of the handshake on one connection. Each connection needs its own instance.

    Args:
        secret: Secret of the job.
        challenge: Challenge that the listener published in the store.
        rank: Rank of the connecting process.
    """

    def __init__(self, secret: bytes, challenge: bytes, rank: int) -> None:
        self._secret = secret
        self._parts = (challenge, os.urandom(_NONCE_BYTES), rank)

    @property
    def hello(self) -> bytes:
        """The first bytes that the connecting rank sends: a random number and an HMAC."""
        return self._parts[1] + _code(self._secret, b"call", *self._parts)

    def is_answered_by(self, welcome: bytes | bytearray) -> bool:
        """Return whether the listener's answer proves that the listener knows the secret of the job."""
        return hmac.compare_digest(welcome, _code(self._secret, b"answer", *self._parts))


class Listener:
    """The listening rank's side of the handshake, for all of its connections.

    Args:
        secret: Secret of the job.
        challenge: Challenge that this rank published in the store.
    """

    def __init__(self, secret: bytes, challenge: bytes) -> None:
        self._secret = secret
        self._challenge = challenge
        self._used: set[bytes] = set()

    def answer(self, hello: bytes | bytearray, rank: int) -> bytes | None:
        """Return the bytes to send to an authenticated caller; None if `hello` is not authentic or is a replay.

        Args:
            hello: First bytes received from the connecting rank.
            rank: Rank that the caller claims to have.
        """
        nonce, code = bytes(hello[:_NONCE_BYTES]), hello[_NONCE_BYTES:]
        parts = (self._challenge, nonce, rank)
        if not hmac.compare_digest(code, _code(self._secret, b"call", *parts)) or nonce in self._used:
            return None
        self._used.add(nonce)  # callers that know the secret alone get here, so this stays small
        return _code(self._secret, b"answer", *parts)


def _code(secret: bytes, role: bytes, challenge: bytes, nonce: bytes, rank: int) -> bytes:
    parts = (b"dcp rank", role, challenge, nonce, str(rank).encode())
    return hmac.digest(secret, b"".join(len(part).to_bytes(4, "little") + part for part in parts), _CODE)
