"""Writing and publishing of the files that ranks share.

Publishing gives final names, then writes the index, then removes the files that the export replaced. At each moment the
folder holds the old or the new model, whole, because new files take free names, or one file replaces one file by a
rename.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

from dcp_core import PeerOptions, SavePlan, SavePlanner, WriteItem, WriteResult
from dcp_core.errors import DcpError
from dcp_format.export.box_writes import write_box
from dcp_format.export.file_map import ExportedTensor, PlannedFile, TensorPlace
from dcp_format.export.gathering import Gathering
from dcp_format.export.shared_files import Gather, RankPart
from dcp_format.safetensors.complete_set import is_writers_name
from dcp_format.safetensors.safetensors_index import INDEX_NAME, index_json
from dcp_format.safetensors.safetensors_write import publish_files
from dcp_io import LocalStore, RangeSink, Sink, Store, SupportsRanges
from dcp_ranks import Coordinator, StreamError, Streams, job_secret
from dcp_ranks.phases.coordinator import DEFAULT_TIMEOUT_SECONDS


def create_files(store: SupportsRanges, files: Iterable[PlannedFile]) -> None:
    """Create the files under their temporary names, in full size; an error leaves none of them.

    Ranks: the coordinator, before any rank writes.
    """
    made: list[str] = []
    try:
        for file in files:
            made.append(file.temporary)
            store.create_sized(file.temporary, file.size).close(sync=False)
        store.sync_folder()
    except BaseException:
        for name in made:
            store.delete(name)
        raise


# A rank may be stopped for a while meanwhile; a killed one is waited for.
_CONNECT_TIMEOUT_SECONDS = 300.0


class RankLink:
    """This rank's connections to the ranks to which it passes bytes on.

    A rank stops after `timeout_seconds` without news from other ranks.
    """

    def __init__(self, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS, peers: PeerOptions | None = None) -> None:
        self._timeout_seconds = timeout_seconds
        self._peers = peers
        self._rank = 0
        self._streams: Streams | None = None

    def open(self, coordinator: Coordinator, plan: SavePlan) -> None:
        """Connect the ranks if any rank passes bytes on.

        Ranks: every rank, with its plan from `share_out`; collective.
        """
        self.close()
        self._rank = coordinator.rank
        part = plan.storage_data
        if not isinstance(part, RankPart) or not part.secret:
            return
        self._streams = streams = Streams(
            coordinator.rank,
            job_secret(part.secret),
            options=self._peers,
            store=coordinator.store,
            timeout_seconds=self._timeout_seconds,
            lost=coordinator.lost_ranks,
        )
        streams.meet(coordinator.all_gather("cards", lambda: streams.card))
        others = {rank for gather in part.gathers for rank in gather.ranks} - {coordinator.rank}
        coordinator.all_gather("connections", lambda: self._connect(streams, others))

    def _connect(self, streams: Streams, others: set[int]) -> None:
        found = streams.connect_many(others, min(self._timeout_seconds, _CONNECT_TIMEOUT_SECONDS))
        for stream in found.values():
            if isinstance(stream, StreamError):
                raise stream

    def write(self, store: Store, plan: SavePlan, planner: SavePlanner, *, threads: int) -> list[WriteResult]:
        """Write, upload and pass on what the rank's plan says."""
        part: RankPart = plan.storage_data
        with self._streams or nullcontext() as streams:
            gathering = Gathering(self._rank, part.gathers, streams, self._timeout_seconds)
            if isinstance(store, SupportsRanges):
                return write_part(store, plan, planner, threads, gathering)
            return upload_part(store, plan, planner, gathering)

    def close(self) -> None:
        """Close the connections."""
        streams, self._streams = self._streams, None
        if streams is not None:
            streams.close()


def write_part(
    store: SupportsRanges, plan: SavePlan, planner: SavePlanner, threads: int, gathering: Gathering
) -> list[WriteResult]:
    """Write one rank's boxes and headers into the shared files, durably; `threads` boxes at the same time."""
    part: RankPart = plan.storage_data
    passed_on = {gather.fqn for gather in part.gathers}
    direct = [item for item in plan.items if item.index.fqn not in passed_on]
    indirect = [item for item in plan.items if item.index.fqn in passed_on]

    def place_of(item: WriteItem) -> TensorPlace:
        return part.places[item.index.fqn]

    with _OpenFiles(store) as files:
        for name, header in part.headers.items():
            with files.using(name) as sink:
                sink.write_at(0, [header])

        def write(item: WriteItem) -> WriteResult:
            place = place_of(item)
            with files.using(place.file) as sink:
                return WriteResult(item.index, write_box(sink, place, item, planner.resolve_data(item)), place.file)

        direct.sort(key=lambda item: (place_of(item).file, place_of(item).offset))
        with ThreadPoolExecutor(threads, thread_name_prefix="dcp-export") as pool:
            results = [*pool.map(write, direct)]
        if part.gathers:

            def write_band(gather: Gather, begin: int, data: memoryview) -> None:
                at = gather.place.offset + begin
                with files.using(gather.place.file) as sink:
                    sink.write_at(at, [data])
                    sink.start_sync(at, len(data))

            results += _gathered(gathering, plan, indirect, planner, write_band)
        files.sync()
    return results


def upload_part(store: Store, plan: SavePlan, planner: SavePlanner, gathering: Gathering) -> list[WriteResult]:
    """Upload this rank's files in order, and pass on what others own; an error leaves no object.

    Raises FileExistsError if an object of this name exists, which is not changed.
    """
    headers = dict(plan.storage_data.headers)
    made: list[Sink] = []

    def begin(name: str) -> None:
        if made:
            made[-1].close()
        made.append(store.create(name))
        made[-1].write([headers.pop(name)])

    def write_band(gather: Gather, begin_at: int, data: memoryview) -> None:
        del begin_at
        if gather.place.file in headers:
            begin(gather.place.file)
        made[-1].write([data])

    try:
        results = _gathered(gathering, plan, plan.items, planner, write_band)
        for name in [*headers]:  # of tensors without bytes
            begin(name)
        if made:
            made[-1].close()
    except BaseException:
        for sink in made:
            sink.abort()
        raise
    return results


def _gathered(
    gathering: Gathering,
    plan: SavePlan,
    items: Sequence[WriteItem],
    planner: SavePlanner,
    write: Callable[[Gather, int, memoryview], None],
) -> list[WriteResult]:
    sent = gathering.run(items, planner, write)
    places = plan.storage_data.places
    # The first result of a tensor has the bytes of all boxes of the rank, since the sum is what is checked.
    return [WriteResult(item.index, sent.pop(item.index.fqn, 0), places[item.index.fqn].file) for item in items]


def check_complete(files: Iterable[PlannedFile], results: Iterable[Iterable[WriteResult]]) -> None:
    """Raise DcpError if a part of a tensor was not written, as when a planner left it out."""
    written: dict[str, int] = defaultdict(int)
    for rank_results in results:
        for result in rank_results:
            written[result.index.fqn] += result.size_in_bytes
    for file in files:
        for tensor in file.tensors:
            if written[tensor.fqn] != tensor.nbytes:
                raise DcpError(
                    f"{tensor.fqn!r} has {tensor.nbytes} bytes, and the ranks wrote {written[tensor.fqn]}: the parts "
                    "of the planner are not the whole tensor"
                )


_MOST_OPEN = 32


class _OpenFiles:
    """Thread-safe cache of open files; the least recently used one is synced and closed first.

    The end of a `with` block closes the files without syncing them: call `sync` before.
    """

    def __init__(self, store: SupportsRanges) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._open: dict[str, RangeSink] = {}
        self._users: dict[str, int] = {}

    def __enter__(self) -> _OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            self._open.popitem()[1].close(sync=False)

    @contextmanager
    def using(self, name: str) -> Iterator[RangeSink]:
        """Keep a file open for the `with` block; OSError may come from syncing another one."""
        with self._lock:
            sink = self._open.pop(name, None) or self._store.open_sized(name)
            self._open[name] = sink  # the last one is the most recently used
            self._users[name] = self._users.get(name, 0) + 1
        try:
            self._close_oldest()
            yield sink
        finally:
            with self._lock:
                self._users[name] -= 1

    def sync(self) -> None:
        while self._open:
            self._close(next(iter(self._open)))

    def _close_oldest(self) -> None:
        with self._lock:
            unused = [name for name in self._open if not self._users[name]]
            oldest = [self._open.pop(name) for name in unused[: max(0, len(self._open) - _MOST_OPEN)]]
        for number, sink in enumerate(oldest):
            try:
                sink.close(sync=True)
            except BaseException:
                for other in oldest[number + 1 :]:
                    other.close(sync=False)
                raise

    def _close(self, name: str) -> None:
        self._open.pop(name).close(sync=True)


def publish(store: Store, files: Sequence[PlannedFile], *, indexed: bool) -> None:
    """Publish complete files or objects, with an index or not, and remove those of an older save.

    Ranks: the coordinator, after all writes.
    """
    sizes = {file.name: [pair for tensor in file.tensors for pair in _sizes(tensor)] for file in files}
    if isinstance(store, LocalStore):
        publish_files(store, {file.name: file.temporary for file in files}, sizes if indexed else None)
    elif indexed:
        store.publish(INDEX_NAME, index_json(sizes))
        for entry in store.list():
            if is_writers_name(entry.name) and entry.name not in sizes:
                store.delete(entry.name)
        store.sync_folder()


def _sizes(tensor: ExportedTensor) -> list[tuple[str, int]]:
    return [(name, tensor.nbytes // len(tensor.stored)) for name, _ in tensor.stored]
