"""`Intake`: what a host takes of another host's part: checked files in its own store, and a note of them.

Not in this module: where the bytes come from.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Mapping

from dcp_io import (
    CopyNote,
    HostStore,
    PassingCrcs,
    Sink,
    crc32,
    read_copy_note,
    spans_by_file,
    write_copy_note,
)
from dcp_manifest import CheckpointIndex, CorruptCheckpointError, DcpError, needed_bytes
from dcp_memory.partners.messages import Message, Offer

__all__ = ["Intake", "is_full"]

_FULL = (errno.ENOSPC, errno.EDQUOT)


def is_full(error: BaseException) -> bool:
    """Whether an error says that a store has no room."""
    return isinstance(error, OSError) and error.errno in _FULL


class Intake:
    """The files of one other host that this host's store is getting, one after the other. Used by one thread.

    A file has its full size only after its bytes have passed all CRCs.

    Args:
        store: This host's folder of the checkpoint.
        index: Index of the checkpoint.
        offer: The other host's part.
    """

    def __init__(self, store: HostStore, index: CheckpointIndex, offer: Offer) -> None:
        save_id = None if index.info is None else index.info.save_id
        needed = needed_bytes(index)
        strange = [name for name, size in offer.sizes.items() if size < needed.get(name, size + 1)]
        if offer.save_id != save_id or strange:
            raise CorruptCheckpointError(
                f"host {offer.host} offers {min(strange, default='files')} of save {offer.save_id}, which the index of "
                f"save {save_id} in {store.url} does not name"
            )
        self._store = store
        self._offer = offer
        self._names = [*offer.sizes]
        self._spans: Mapping[str, list[tuple[int, int, int]]] = spans_by_file(index)
        self._sink: Sink | None = None
        self._crcs: PassingCrcs | None = None
        self._number = -1
        self.wanted: tuple[int, ...] = ()
        """Numbers of the files that this host lacks; set by `begin`."""
        self._left: list[int] = []
        self._made: list[str] = []

    @property
    def is_done(self) -> bool:
        """Whether all wanted files are complete."""
        return not self._left

    def begin(self) -> None:
        """Note the names of the files that come, and make out which of them are lacking."""
        sizes = {entry.name: entry.bytes for entry in self._store.list()}
        self.wanted = tuple(
            number for number, name in enumerate(self._names) if sizes.get(name, -1) < self._offer.sizes[name]
        )
        self._left = [*self.wanted]
        self._note_copies({**self._copies(), self._offer.host: tuple(self._names)})
        for number in [number for number in self.wanted if not self._offer.sizes[self._names[number]]]:
            self._open(number)
            self._complete()

    def take(self, message: Message, piece: memoryview) -> None:
        """Take the next bytes of a file.

        Raises:
            CorruptCheckpointError: They are not what was sent, or not what was saved, or not the next ones.
            OSError: The store failed, or is full.
        """
        name = self._names[message.number]
        if crc32(piece) != message.crc:
            raise CorruptCheckpointError("a piece was changed on its way", file=name, offset=message.offset)
        if self._sink is None:
            self._open(message.number)
        sink, crcs = self._sink, self._crcs
        if sink is None or crcs is None or message.number != self._number or message.offset != sink.tell():
            raise CorruptCheckpointError("a piece is not the next one", file=name, offset=message.offset)
        crcs.take(message.offset, piece)
        sink.write([piece])
        if sink.tell() >= self._offer.sizes[name]:
            self._complete()

    def _open(self, number: int) -> None:
        if number not in self._left:
            raise CorruptCheckpointError("a piece of a file came that was not wanted", file=self._names[number])
        name = self._names[number]
        self._store.delete(name)  # what an interrupted copy has left of it
        self._sink, self._crcs = self._store.create(name), PassingCrcs(name, self._spans.get(name, []))
        self._number = number

    def _complete(self) -> None:
        if self._sink is not None:
            self._sink.close(sync=True)
            self._made.append(self._names[self._number])
            self._left.remove(self._number)
        self._sink = self._crcs = None

    def end(self) -> None:
        """Make the names of the files durable, after the last one."""
        self._store.sync_folder()

    def abort(self, *, discard: bool) -> None:
        """Remove the file that is incomplete; with `discard` those that are complete, too. Errors are not raised."""
        sink, self._sink = self._sink, None
        with contextlib.suppress(OSError, DcpError):
            if sink is not None:
                sink.abort()
        if discard:
            made, self._made = self._made, []
            with contextlib.suppress(OSError, DcpError):
                for name in made:
                    self._store.delete(name)
                self._note_copies({host: names for host, names in self._copies().items() if host != self._offer.host})

    def _copies(self) -> Mapping[str, tuple[str, ...]]:
        """Return what is noted of copies of this save."""
        note = read_copy_note(self._store)
        return note.copies if note.save_id == self._offer.save_id else {}

    def _note_copies(self, copies: Mapping[str, tuple[str, ...]]) -> None:
        write_copy_note(self._store, CopyNote(self._offer.save_id, copies))
