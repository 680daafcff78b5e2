"""Seeded faults of the commit protocol on ranks in virtual time, and what must hold after each.

A checkpoint exists. The ranks save another one to the same id while something fails. Then the machine loses power. Then
the job starts again, and saves a third one.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from dcp_core import load_keys, save
from dcp_core.records.metadata import TensorProperties
from dcp_core.saving import _Save
from dcp_core.shards.shards import LocalShard, LocalTensor
from dcp_core.testing.rehearsal.storage import VirtualStore
from dcp_core.testing.rehearsal.world import Cluster, VirtualReader, VirtualWriter, World
from dcp_io import StoreBackend, engine
from dcp_io.saves import save_session
from dcp_io.saves.save_session import JoinedSave, SaveSession
from dcp_manifest.folders.folder import SAVE_MARKER_PREFIX
from dcp_ranks import PeerOptions
from dcp_ranks.errors import CoordinatorLostError
from dcp_ranks.phases.store_phase import Waiting
from dcp_ranks.transport.store_wire import StoreWire

__all__ = ["MUTANTS", "STEPS", "PromiseBrokenError", "try_seed"]

RANKS, ROWS, PLACE = 4, 8, "run/step-1"
TIMEOUT_SECONDS = 20.0
NEVER = 1e9
LIMIT_SECONDS = 200.0
STEPS = 700
OPERATIONS = 80
"""About as many waits, and operations of the disk, as a save has."""
STAR = Cluster(RANKS, 2, timeout_seconds=TIMEOUT_SECONDS)
TREE = Cluster(RANKS, 2, timeout_seconds=TIMEOUT_SECONDS, peers=PeerOptions(leaders_above=1, fan_out=1))


class PromiseBrokenError(AssertionError):
    """What a seed has found."""


def state(rank: int, value: float) -> dict[str, Any]:
    """One rank's rows of a tensor, a replicated tensor and an object."""
    rows = torch.full((ROWS // RANKS, 3), value)
    shard = LocalShard(torch.Size((rank * len(rows), 0)), rows.shape, lambda: rows)
    cut = LocalTensor(torch.Size((ROWS, 3)), TensorProperties(torch.float32), False, (shard,))
    return {"cut": cut, "same": torch.full((5,), value), "step": int(value)}


def save_value(world: World, value: float, rank: int) -> None:
    save(state(rank, value), storage_writer=VirtualWriter(world, PLACE))


@functools.cache
def first_files() -> Any:
    """The disk with a checkpoint of value 1."""
    world = World(STAR)
    for task in world.run(functools.partial(save_value, world, 1.0)):
        assert task.error is None
    return world.disk.files, world.disk.durable


def found_value(world: World) -> int:
    """The value of the checkpoint, which must be whole."""
    try:
        with world.installed():
            found = load_keys(storage_reader=VirtualReader(world, PLACE))
    except Exception as error:
        raise PromiseBrokenError(f"the checkpoint cannot be loaded: {error!r}") from error
    values = {*found["cut"].flatten().tolist(), *found["same"].tolist(), float(found["step"])}
    if len(values) > 1:
        raise PromiseBrokenError(f"the checkpoint mixes saves: {values}")
    return int(found["step"])


def plan_faults(world: World) -> tuple[list[float], set[str]]:
    """Draw faults; return when the ranks start, and the faults' kinds."""
    draw, network, starts, kinds = world.clock.random, lambda: world.network, [0.0] * RANKS, set()
    for _ in range(draw.choice((1, 1, 1, 2))):
        kind = draw.choice(("kill", "host", "power", "disk", "store", "late", "slow"))
        kinds.add(kind)
        rank, seconds = draw.randrange(RANKS), draw.choice((0.001, 5.0, 100.0))
        host, first = [rank // 2 * 2, rank // 2 * 2 + 1], draw.randrange(8 if rank else 40)
        faults: dict[str, Callable[[], None]] = {
            "kill": lambda rank=rank: network().kill([rank]),  # type: ignore[misc]
            "host": lambda h=host, s=seconds: network().kill(h, "its host is gone", seconds=s),  # type: ignore[misc]
            "power": lambda: network().kill(range(RANKS)),
            "store": lambda: network().lose_store(),
        }
        if kind == "late":
            starts[rank] = draw.choice((0.01, 5.0, 2.5 * TIMEOUT_SECONDS, NEVER))
        elif kind in faults and draw.random() < 0.5:
            world.clock.at_step[draw.randrange(1, STEPS)] = faults[kind]
        elif kind in faults:
            world.disk.at_operation[draw.randrange(1, OPERATIONS)] = faults[kind]
        else:
            left = iter(range(first + draw.choice((1, 1, 1000))))
            delay = draw.choice((0.0, 2.5 * TIMEOUT_SECONDS)) if kind == "slow" else None
            world.disk.fails = functools.partial(_fails, world, rank, first, left, delay)
    return starts, kinds


def _fails(world: World, rank: int, first: int, left: Iterator[int], seconds: float | None, *_: str) -> bool:
    """The rank's operations from number `first` on fail, or the first of them takes long."""
    task = world.clock.task
    if task is None or task.number != rank:
        return False
    number = next(left, -1)
    if seconds is not None and number == first:
        world.clock.wait_until(world.clock.now + seconds)
    return seconds is None and number >= first


def try_seed(seed: int) -> str:
    """Raise PromiseBrokenError if a promise is broken with this seed; return what happened."""
    world = World(TREE if seed % 2 else STAR, seed)
    world.disk.files, world.disk.durable = copy.deepcopy(first_files())
    starts, kinds = plan_faults(world)
    tasks = world.run(functools.partial(save_value, world, 2.0), starts=starts, limit_seconds=LIMIT_SECONDS)
    dead = world.network.dead | {rank for rank, start in enumerate(starts) if start == NEVER}
    errors = {task.number: task.error for task in tasks if task.number not in dead}
    if any(isinstance(error, SystemExit) for error in errors.values()):
        raise PromiseBrokenError(f"ranks wait for ever: {errors}")
    succeeded = [rank for rank, error in errors.items() if error is None]
    lost = [error for error in errors.values() if isinstance(error, CoordinatorLostError)]
    if succeeded and len(succeeded) < len(errors) and not (lost or dead):
        raise PromiseBrokenError(f"ranks {succeeded} have saved, others failed: {errors}")
    world.disk.fails = lambda *_: False
    before = found_value(world)
    world.disk.crash()
    value = found_value(world)
    saved = [task.number for task in tasks if task.error is None]  # also ranks that died with their host later
    if saved and value != 2:
        raise PromiseBrokenError(f"ranks {saved} have saved, but a loss of power brought the old checkpoint back")
    if value not in (before, 1):
        raise PromiseBrokenError(f"the checkpoint has the value {value}")
    save_next(world)
    return f"{'+'.join(sorted(kinds))}: {len(succeeded)} of {len(errors)} ranks saved, value {value}"


def save_next(world: World) -> None:
    """Start the job again, without faults: nothing hinders it, and no leftovers stay."""
    world.clock.at_step.clear()
    world.disk.at_operation.clear()
    world.clock.now += 60  # a machine takes longer to restart than a torn marker counts as alive
    # A rank that makes a file after the coordinator has removed the save's files and marker, and then dies, leaves it.
    marked = {path.rpartition(SAVE_MARKER_PREFIX)[2] for path in world.disk.files if SAVE_MARKER_PREFIX in path}
    current = {f"{PLACE}/{name}" for name in StoreBackend(VirtualStore(world.disk, PLACE)).read_index().files}
    data = {path for path in world.disk.files if path.endswith(".distcp")} - current
    orphans = {path for path in data if path.split(".")[-2] not in marked}
    for task in world.run(functools.partial(save_value, world, 3.0), limit_seconds=LIMIT_SECONDS):
        if task.error is not None:
            raise PromiseBrokenError(f"the next save fails: {task.error!r}") from task.error
    if found_value(world) != 3:
        raise PromiseBrokenError("the next save has not replaced the checkpoint")
    left = sorted(set(world.disk.files) - orphans)
    if len(left) != 1 + RANKS:
        raise PromiseBrokenError(f"files are left after the next save: {left}")


def _patched(target: object, name: str, change: Callable[..., Any]) -> Any:
    """Replace a method by `change`, which gets the original first."""
    original = getattr(target, name)

    @functools.wraps(original)
    def changed(*args: Any, **options: Any) -> Any:
        return change(original, *args, **options)

    return mock.patch.object(target, name, changed)


def _data_is_not_synced(write: Any, *args: Any, **options: Any) -> Any:
    return write(*args, **{**options, "sync": False})


def _names_are_not_synced(write: Any, store: Any, *args: Any, **options: Any) -> Any:
    class Unsynced(VirtualStore):
        def sync_folder(self) -> None:
            pass

    return write(Unsynced(store._disk, store._folder), *args, **options)


def _index_is_not_synced(publish: Any, session: SaveSession, name: str, data: bytes) -> None:
    with mock.patch.object(session, "_sync", False):
        publish(session, name, data)


def _index_is_removed_first(publish: Any, session: SaveSession, name: str, data: bytes) -> None:
    session._store.delete(name)
    publish(session, name, data)


def _old_files_are_removed_first(publish: Any, session: SaveSession, name: str, data: bytes) -> None:
    for old in session._marker.replaced:
        session._store.delete(old)
    publish(session, name, data)


def _failed_writes_are_reported_as_done(write: Any, store: VirtualStore, *args: Any, **options: Any) -> Any:
    class Silent(VirtualStore):
        def create(self, name: str, *, sync: bool = True) -> Any:
            sink = super().create(name, sync=sync)
            put, close = sink.write, sink.close
            sink.write, sink.close = lambda data: silently(put, data), lambda: silently(close)  # type: ignore[method-assign]
            return sink

        def sync_folder(self) -> None:
            silently(super().sync_folder)

    def silently(call: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(OSError):
            call(*arguments)

    return write(Silent(store._disk, store._folder), *args, **options)


def _waits_for_ever(over: Any, waiting: Waiting) -> bool:
    over(waiting)
    waiting.due = time.monotonic() + 1
    return False


def _each_rank_decides_alone(claim: Any, wire: StoreWire, key: str, text: str) -> str:
    if not key.endswith("/verdict"):
        return str(claim(wire, key, text))
    wire._store.set(wire._prefix + key, text.encode())
    return text


def _abort_ignores_the_marker(abort: Any, save: JoinedSave) -> None:
    with contextlib.suppress(OSError):
        for name in save._files:
            save._store.delete(name)
    abort(save)


def _success_is_declared_before_publishing(publish: Any, run: _Save, results: list[Any]) -> None:
    run.writer.follow_commit = lambda _: publish(run, results)  # type: ignore[method-assign]


def _data_come_later(write: Any, store: VirtualStore, *args: Any, **options: Any) -> Any:
    """The files stay empty until a moment after the call."""
    found, disk = write(store, *args, **options), store._disk
    task = disk.clock.task
    for name in found.files:
        file = disk.files[store._path(name)]
        data, file.data, file.durable = file.data, bytearray(), 0

        def arrive(file: Any = file, data: bytearray = data) -> None:
            if task is not None and not task.dead:
                file.data, file.durable = data, len(data)

        disk.clock.at(disk.clock.now + 0.02, arrive)
    return found


MUTANTS: dict[str, tuple[tuple[object, str, Callable[..., Any]], ...]] = {
    "the index is published before the data are written": ((engine, "write_items", _data_come_later),),
    "data files are not synced": ((engine, "write_items", _data_is_not_synced),),
    "names of data files are not synced": ((engine, "write_items", _names_are_not_synced),),
    "the index is not synced": ((SaveSession, "publish", _index_is_not_synced),),
    "the old index is removed before the new one is there": ((SaveSession, "publish", _index_is_removed_first),),
    "replaced files are removed before the index is published": (
        (SaveSession, "publish", _old_files_are_removed_first),
    ),
    "a rank reports a failed write as done": ((engine, "write_items", _failed_writes_are_reported_as_done),),
    "a rank takes a decision alone": ((StoreWire, "claim", _each_rank_decides_alone),),
    "a rank that fails removes files that may be published": ((JoinedSave, "abort", _abort_ignores_the_marker),),
    "success is declared before the index is published": ((_Save, "publish", _success_is_declared_before_publishing),),
    "a missing rank is waited for without a limit": ((Waiting, "over", _waits_for_ever),),
    "leftovers of a dead save stay": ((save_session, "remove_dead_saves", lambda *_: None),),
}


@contextlib.contextmanager
def planted(mutant: str) -> Iterator[None]:
    """Break the protocol."""
    with contextlib.ExitStack() as stack:
        for target, name, change in MUTANTS[mutant]:
            stack.enter_context(_patched(target, name, change))
        yield
