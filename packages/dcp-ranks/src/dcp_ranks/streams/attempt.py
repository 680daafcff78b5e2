"""Connect to one other rank, trying its addresses in order."""

from __future__ import annotations

import errno
import os
import select
import socket
from typing import Final

from dcp_ranks.streams.cards import LOCAL_PORT, Place, StreamCard, places_of
from dcp_ranks.streams.greetings import (
    ANSWER_BYTES,
    NO_MEMORY,
    REFUSAL,
    FirstBytes,
    is_local,
    send_proof,
    write_greeting,
)
from dcp_ranks.transport.listening import CONNECT_TIMEOUT_SECONDS, Call

_AGAIN: Final = 5
_AGAIN_SECONDS: Final = 0.05
_OTHER_HOST: Final = "it shares no memory with this rank, and so is of another host"
_BUSY: Final = (errno.EAGAIN, errno.EWOULDBLOCK)


def name_place(place: Place) -> str:
    """Return an address as text."""
    address, port = place
    if port == LOCAL_PORT:
        return "its Unix socket"
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


class Attempt:
    """Attempt to connect to one rank. Call `step` when the socket is ready for `events`, or at `until`."""

    def __init__(self, card: StreamCard, rank: int, host: str, secret: bytes, now: float) -> None:
        self.rank = card.rank
        self.connection: socket.socket | None = None
        self.events = 0
        self.until = now
        self.is_done = False
        """Whether `connection` is authenticated and belongs to the caller."""
        self.failed: list[str] = []
        self._card = card
        self._own_rank = rank
        self._secret = secret
        self._places = list(places_of(card, host))
        self._again = 0
        self._greeted = False
        self._call: Call | None = None
        self._answer: FirstBytes | None = None

    @property
    def where(self) -> str:
        """The address that is tried, or empty."""
        return name_place(self._places[0]) if self._places else ""

    @property
    def has_failed(self) -> bool:
        """Whether no address is left."""
        return not self._places

    def step(self, now: float) -> None:
        """Continue without blocking."""
        if self.connection is None:
            self._connect(now)
        elif not self._greeted and now >= self.until:
            self._leave(
                f"it did not answer within {CONNECT_TIMEOUT_SECONDS:.0f} s (does a firewall drop packets?)", now
            )
        else:
            try:
                if self._greeted:
                    self._take_answer(now)
                else:
                    self._greet()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._fail(error, now)

    def give_up(self, waited_seconds: float) -> str:
        """Close the socket; return why connecting failed."""
        reasons = self.failed
        if self._places and self._greeted:
            reasons = [
                f"it did not answer within {waited_seconds:.1f} s: it is stopped, or does not connect to this rank"
            ]
        elif self._places:
            reasons = [*reasons, f"{self.where}: no connection within {waited_seconds:.1f} s"]
        self.close()
        return (
            "; ".join(reasons) or "it listens nowhere: it has no address in the network, or no free port (PeerOptions)"
        )

    def close(self) -> None:
        """Close the socket unless it is done."""
        if self._answer is not None:
            self._answer.close()
        if self.connection is not None and not self.is_done:
            self.connection.close()
            self.connection = None
        self.events = 0

    def _connect(self, now: float) -> None:
        if not self._places:
            return
        address, port = self._places[0]
        try:
            if port == LOCAL_PORT:
                made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            else:
                made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        except OSError as error:
            self._fail(error, now)
            return
        made.setblocking(False)
        code = made.connect_ex(f"\0{address}" if port == LOCAL_PORT else (address, port))
        if code in _BUSY:  # the queue of a Unix socket is full
            made.close()
            self._try_again(now) if self._again < _AGAIN else self._leave("too many others connect to it", now)
            return
        self.connection, self.events, self.until = made, select.POLLOUT, now + CONNECT_TIMEOUT_SECONDS
        self._greeted = False
        if code not in (0, errno.EINPROGRESS):
            self._fail(OSError(code, os.strerror(code)), now)

    def _greet(self) -> None:
        connection = self.connection
        if connection is None:
            return
        code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        self._answer = FirstBytes(connection, ANSWER_BYTES)
        self._call = Call(self._secret, self._card.challenge, self._own_rank)
        send_proof(connection, write_greeting(self._own_rank, self._call.hello))
        self._greeted, self.events, self.until = True, select.POLLIN, float("inf")

    def _take_answer(self, now: float) -> None:
        connection, first, call = self.connection, self._answer, self._call
        if connection is None or first is None or call is None:
            return
        answer = first.receive()
        if answer is None:
            return
        if answer == REFUSAL:
            self._leave("it refused this rank: do all ranks have the same secret (DCP_JOB_SECRET)?", now)
        elif answer == NO_MEMORY:
            self._leave(_OTHER_HOST, now)
        elif not call.is_answered_by(answer):
            self._leave("who answered does not know the secret of this job (DCP_JOB_SECRET)", now)
        elif is_local(connection) and not first.prove_host():
            self._leave(_OTHER_HOST, now)
        else:
            self.is_done, self.events = True, 0

    def _fail(self, error: OSError, now: float) -> None:
        """Retry if the rank was reached, as it may have had too many guests; else try the next address."""
        if self._greeted and self._again < _AGAIN:
            self._try_again(now)
        else:
            self._leave(error.strerror or str(error), now)

    def _try_again(self, now: float) -> None:
        self._again += 1
        self.close()
        self.until = now + _AGAIN_SECONDS * 2**self._again

    def _leave(self, reason: str, now: float) -> None:
        self.failed.append(f"{self.where}: {reason}")
        self.close()
        self._places.pop(0)
        self._again = 0
        self.until = now
