"""The requests that a keeper answers, one function each. None of them waits.

The answer `{"wait": true}` means that memory is not there yet; the client asks again.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from dcp_memory.keeper.arenas import Arenas
from dcp_memory.keeper.catalogue import Catalogue, Reservation, StoredObject
from dcp_memory.keeper.options import KeeperOptions
from dcp_memory.keeper.peer import Peer
from dcp_memory.keeper.pool import Pool
from dcp_memory.keeper.slabs import Slabs
from dcp_memory.wire import EXTENT, PAGE_BYTES


class Keeper:
    """State of a keeper."""

    def __init__(self, options: KeeperOptions, pool: Pool) -> None:
        self.options = options
        self.pool = pool
        self.slabs = Slabs(pool)
        self.arenas = Arenas(pool, options.generations)
        self.catalogue = Catalogue(pool, self.slabs, self.arenas)
        self.began = time.time()
        self.stopping = False
        self.clients: Callable[[], int] = int

    def forget(self, peer: Peer) -> None:
        """Free everything of a closed connection."""
        for stored in peer.opened.values():
            self.catalogue.leave(stored, peer.number)
        for reservation in peer.reservations.values():
            self.catalogue.drop(reservation, lost=True)
        peer.opened.clear()
        peer.reservations.clear()
        self.arenas.lose(peer.borrower)


def answer(keeper: Keeper, peer: Peer, fields: dict[str, Any]) -> None:
    """Answer one request. A failure is an answer with the key `error`."""
    try:
        _REQUESTS[fields["do"]](keeper, peer, fields)
    except MemoryError as error:
        peer.answer({"error": "full", "message": str(error) or "no memory"})
    except ConnectionError:
        raise
    except OSError as error:
        peer.answer({"error": "system", "number": error.errno, "message": error.strerror or str(error)})
    except Exception as error:  # noqa: BLE001 - whatever one client sends, the keeper has the checkpoints of others
        peer.answer({"error": "bad", "message": f"{type(error).__name__}: {error}"})


def _create(keeper: Keeper, peer: Peer, fields: dict[str, Any]) -> None:
    key = None if fields["key"] is None else str(fields["key"])
    made = keeper.catalogue.reserve(key, peer.number)
    if made is None:
        peer.answer({"error": "exists"})
        return
    number = peer.new_number()
    peer.reservations[number] = made
    peer.answer({"id": number})


def _extend(keeper: Keeper, peer: Peer, fields: dict[str, Any]) -> None:
    reservation = peer.reservations[fields["id"]]
    nbytes = int(fields["nbytes"])
    if nbytes < 1:
        raise ValueError("a range has at least one byte")
    piece = keeper.slabs.take(nbytes)
    if piece is None:
        peer.answer({"wait": True})
        return
    reservation.ranges.append(piece)
    peer.answer({"segment": piece.inode, "offset": piece.offset, "nbytes": piece.nbytes})


def _refer(keeper: Keeper, peer: Peer, fields: dict[str, Any]) -> None:
    reservation = peer.reservations[fields["id"]]
    arena = keeper.arenas.get(fields["inode"])
    if arena is None or arena.segment.device != fields["device"] or keeper.arenas.is_free(arena):
        peer.answer({"refers": False})
        return
    if arena not in reservation.arenas:
        reservation.arenas.append(arena)
        keeper.arenas.use(arena)
    peer.answer({"refers": True})


def _commit(keeper: Keeper, peer: Peer, fields: dict[str, Any]) -> None:
    reservation = peer.reservations[fields["id"]]
    if fields["small"]:
        keeper.catalogue.commit_blob(reservation, fields["payload"])
    else:
        size, left, key = int(fields["size"]), int(fields["left"]), fields.get("key")
        extents = fields["payload"]
        _check_extents(reservation, extents, size, left)
        keeper.catalogue.commit(reservation, size, extents, left, None if key is None else str(key))
    del peer.reservations[fields["id"]]
    peer.answer({})


def _check_extents(reservation: Reservation, payload: bytes, size: int, left: int) -> None:
    ends = {arena.segment.inode: arena.segment.nbytes for arena in reservation.arenas}
    for piece in reservation.ranges:
        ends[piece.inode] = max(ends.get(piece.inode, 0), piece.offset + piece.nbytes)
    total = 0
    for inode, offset, length in EXTENT.iter_unpack(payload):
        if offset + length > ends.get(inode, -1):
            raise ValueError("an extent is not in memory of the object")
        total += length
    last = reservation.ranges[-1].nbytes if reservation.ranges else 0
    if total != size or not 0 <= left <= last or left % PAGE_BYTES:
        raise ValueError(f"extents of {total} bytes, with {left} of {last} left, for an object of {size}")


def _drop(keeper: Keeper, peer: Peer, fields: dict[str, Any]) -> None:
    reservation = peer.reservations.pop(fields["id"], None)
    if reservation is not None:
        keeper.catalogue.drop(reservation)
    peer.answer({})


def _publish(keeper: Keeper, peer: Peer, fields: dict[str, Any]) -> None:
    keeper.catalogue.publish(str(fields["key"]), fields["payload"])
    peer.answer({})


def _touch(keeper: Keeper, peer: Peer, fields: dict[str, Any]) -> None:
    stored = _found(keeper, peer, fields)
    if stored is not None:
        stored.mtime = time.time()
        peer.answer({})


def _stat(keeper: Keeper, peer: Peer, fields: dict[str, Any]) -> None:
    stored = _found(keeper, peer, fields)
    if stored is not None:
        peer.answer({"size": stored.size, "mtime": stored.mtime})


def _open(keeper: Keeper, peer: Peer, fields: dict[str, Any]) -> None:
    """Open an object: a small one in the answer; the memory of others stays until `release`."""
    stored = _found(keeper, peer, fields)
    if stored is None:
        return
    if stored.blob is not None:
        peer.answer({"small": True}, stored.blob)
        return
    number = peer.new_number()
    stored.holders += 1
    peer.opened[number] = stored
    peer.answer({"small": False, "id": number, "size": stored.size}, stored.extents)


def _release(keeper: Keeper, peer: Peer, fields: dict[str, Any]) -> None:
    for number in fields["ids"]:
        stored = peer.opened.pop(number, None)
        if stored is not None:
            keeper.catalogue.release(stored)
    peer.answer({})


def _list(keeper: Keeper, peer: Peer, fields: dict[str, Any]) -> None:
    peer.answer({}, json.dumps(keeper.catalogue.listing(str(fields["folder"]))).encode())


def _folders(keeper: Keeper, peer: Peer, fields: dict[str, Any]) -> None:
    peer.answer({}, json.dumps(keeper.catalogue.folders(str(fields["folder"]))).encode())


def _delete(keeper: Keeper, peer: Peer, fields: dict[str, Any]) -> None:
    keeper.catalogue.delete(str(fields["key"]))
    peer.answer({})


def _descriptor(keeper: Keeper, peer: Peer, fields: dict[str, Any]) -> None:
    segment = keeper.pool.segments[fields["segment"]]
    arena = keeper.arenas.get(segment.inode)
    if arena is not None:
        arena.known.add(peer.number)
    peer.answer({"nbytes": segment.nbytes, "lent": arena is not None}, descriptor=segment.open_for(peer.number))


def _lend(keeper: Keeper, peer: Peer, fields: dict[str, Any]) -> None:
    nbytes = int(fields["nbytes"])
    if nbytes < 1:
        raise ValueError("a loan has at least one byte")
    if fields["prepare"]:
        arena = keeper.arenas.prepare(peer.borrower, nbytes)
    else:
        arena = keeper.arenas.lend(peer.borrower, nbytes, force=bool(fields["force"]))
    if arena is None:
        peer.answer({"wait": True, "making": bool(peer.borrower.making)})
    else:
        destroyed = keeper.pool.destroyed
        peer.answer({"segment": arena.segment.inode, "nbytes": arena.segment.nbytes, "destroyed": destroyed})


def _give_back(keeper: Keeper, peer: Peer, fields: dict[str, Any]) -> None:
    arena = keeper.arenas.get(fields["segment"])
    if arena is not None and arena.borrower is peer.borrower:
        keeper.arenas.give_back(arena)
    peer.answer({})


def _gone(keeper: Keeper, peer: Peer, fields: dict[str, Any]) -> None:
    peer.answer({"gone": [inode for inode in fields["segments"] if inode not in keeper.pool.segments]})


def _stay(keeper: Keeper, peer: Peer, fields: dict[str, Any]) -> None:
    del keeper, fields
    peer.keeps_alive = True
    peer.answer({})


def _status(keeper: Keeper, peer: Peer, fields: dict[str, Any]) -> None:
    del fields
    arenas = [*keeper.arenas.all()]
    free = sum(each.segment.nbytes for each in arenas if keeper.arenas.is_free(each))
    count, stored = keeper.catalogue.totals()
    peer.answer(
        {
            "run": keeper.options.run,
            "pid": os.getpid(),
            "began": keeper.began,
            "clients": keeper.clients(),
            "objects": count,
            "object_bytes": stored,
            "bytes": keeper.pool.total,
            "max_bytes": keeper.pool.max_bytes,
            "arenas": len(arenas),
            "arena_bytes": keeper.arenas.nbytes,
            "free_arena_bytes": free,
            "lent_bytes": sum(each.segment.nbytes for each in arenas if each.lent),
            "slab_bytes": keeper.slabs.nbytes,
            "used_slab_bytes": keeper.slabs.used_bytes,
            "generations": keeper.options.generations,
            "idle_timeout_seconds": keeper.options.idle_timeout_seconds,
        }
    )


def _stop(keeper: Keeper, peer: Peer, fields: dict[str, Any]) -> None:
    del fields
    keeper.stopping = True
    peer.answer({"pid": os.getpid()})


def _found(keeper: Keeper, peer: Peer, fields: dict[str, Any]) -> StoredObject | None:
    stored = keeper.catalogue.find(str(fields["key"]))
    if stored is None:
        peer.answer({"error": "missing"})
    return stored


_REQUESTS: Mapping[str, Callable[[Keeper, Peer, dict[str, Any]], None]] = MappingProxyType(
    {
        "create": _create,
        "extend": _extend,
        "refer": _refer,
        "commit": _commit,
        "drop": _drop,
        "publish": _publish,
        "touch": _touch,
        "stat": _stat,
        "open": _open,
        "release": _release,
        "list": _list,
        "folders": _folders,
        "delete": _delete,
        "descriptor": _descriptor,
        "lend": _lend,
        "give_back": _give_back,
        "gone": _gone,
        "stay": _stay,
        "status": _status,
        "stop": _stop,
    }
)
