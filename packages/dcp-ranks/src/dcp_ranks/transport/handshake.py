"""A handshake by which two ranks prove to each other over a connection that they belong to the same job.

Both know a secret, which travels over the group's store alone: what they send are codes (HMAC) over random numbers that
nobody has used. The one that listens leaves its number, the challenge, in the store; the caller sends its own with the
code that proves it; the answer proves the listener. So the first bytes of a connection decide, and no stranger learns
more than codes. Not here: connections, and secrecy of what is sent over them afterwards.
"""

from __future__ import annotations

import hmac
import os

__all__ = ["Call", "Listener", "new_challenge"]

_NONCE_BYTES = 32
_CODE = "sha256"


def new_challenge() -> bytes:
    """A random number that one who listens leaves in the store; of one listener alone."""
    return os.urandom(_NONCE_BYTES)


class Call:
    """One connection as its caller proves itself. Each connection needs a call of its own.

    Args:
        secret: Of the job.
        challenge: That the listener left in the store.
        rank: The caller's.
    """

    def __init__(self, secret: bytes, challenge: bytes, rank: int) -> None:
        self._secret = secret
        self._parts = (challenge, os.urandom(_NONCE_BYTES), rank)

    @property
    def hello(self) -> bytes:
        """What the caller sends first."""
        return self._parts[1] + _code(self._secret, b"call", *self._parts)

    def is_answered_by(self, welcome: bytes | bytearray) -> bool:
        """Whether the answer is that of one who listens and knows the secret."""
        return hmac.compare_digest(welcome, _code(self._secret, b"answer", *self._parts))


class Listener:
    """One place that takes connections.

    Args:
        secret: Of the job.
        challenge: That it left in the store.
    """

    def __init__(self, secret: bytes, challenge: bytes) -> None:
        self._secret = secret
        self._challenge = challenge
        self._used: set[bytes] = set()

    def answer(self, hello: bytes | bytearray, rank: int) -> bytes | None:
        """The answer for a caller that has proved itself; None for a stranger, or for a greeting that was sent before.

        Args:
            hello: What came first.
            rank: The rank that the caller claims to be.
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
