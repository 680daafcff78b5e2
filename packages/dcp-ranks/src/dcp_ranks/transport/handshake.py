"""Handshake by which two ranks prove to each other over a connection that they belong to the same job.

Both ranks know a secret, which is sent only over the group's store: over connections they send codes (HMAC) of fresh
random numbers. The listener leaves its random number, the challenge, in the store; the caller sends a random number of
its own, with a code that proves that the caller knows the secret; the answer of the listener proves the same. So the
first bytes of a connection decide, and a stranger sees only codes. This module opens no connection, and does not
encrypt what is sent afterwards.
"""

from __future__ import annotations

import hmac
import os

__all__ = ["Call", "Listener", "new_challenge"]

_NONCE_BYTES = 32
_CODE = "sha256"


def new_challenge() -> bytes:
    """Return a random number for one listener, which the listener leaves in the store."""
    return os.urandom(_NONCE_BYTES)


class Call:
    """The caller's side of the handshake on one connection. Each connection needs its own instance.

    Args:
        secret: Secret of the job.
        challenge: Challenge that the listener left in the store.
        rank: Rank of the caller.
    """

    def __init__(self, secret: bytes, challenge: bytes, rank: int) -> None:
        self._secret = secret
        self._parts = (challenge, os.urandom(_NONCE_BYTES), rank)

    @property
    def hello(self) -> bytes:
        """The first bytes that the caller sends."""
        return self._parts[1] + _code(self._secret, b"call", *self._parts)

    def is_answered_by(self, welcome: bytes | bytearray) -> bool:
        """Whether the answer proves a listener that knows the secret."""
        return hmac.compare_digest(welcome, _code(self._secret, b"answer", *self._parts))


class Listener:
    """The listener's side of the handshake, for all its connections.

    Args:
        secret: Secret of the job.
        challenge: Challenge that the listener left in the store.
    """

    def __init__(self, secret: bytes, challenge: bytes) -> None:
        self._secret = secret
        self._challenge = challenge
        self._used: set[bytes] = set()

    def answer(self, hello: bytes | bytearray, rank: int) -> bytes | None:
        """Return the answer for a caller that has proved itself; None for a stranger, or for a replayed greeting.

        Args:
            hello: First bytes received from the caller.
            rank: Number of the rank that the caller claims to be.
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
