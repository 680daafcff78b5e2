"""Files that the ranks of one save share: the coordinator decides which rank writes what, and what it passes on.

One rank writes each range of a file: a column shard would be one small write per row.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from dcp_core import SavePlan, WriteItem
from dcp_core.errors import DcpError
from dcp_core.tables.plan_columns import columns_of
from dcp_format.export.file_map import ExportedTensor, PlannedFile, TensorPlace, tensor_data_of
from dcp_io import RangeSink
from dcp_io.saves.save_files import this_process
from dcp_manifest.index.dtypes import ITEM_BYTES
from dcp_manifest.index.runs import Runs, box_runs

_BAND_BYTES = 4 << 20
# A guess: on ext4, runs of 8 KiB took as long to pass on as to write one by one; shorter ones are more system calls.
_SMALL_RUN_BYTES = 256 << 10
OwnerOf = Callable[[int, int], int]


@dataclass(frozen=True, slots=True)
class RankBox:
    """A box of a tensor that one rank holds; offsets and sizes in elements."""

    rank: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Gather:
    """A tensor with ranges of bytes, the bands. One rank writes a band and gets the other ranks' parts.

    Attributes:
        number: Ascending in the order of the data.
        boxes: Boxes of all ranks; together they are the tensor.
        stops: Ascending ends of the bands, as byte offsets in the tensor.
        owners: For each band, the rank that writes it.
    """

    number: int
    fqn: str
    place: TensorPlace
    shape: tuple[int, ...]
    boxes: Sequence[RankBox]
    stops: Sequence[int]
    owners: Sequence[int]

    @property
    def ranks(self) -> set[int]:
        """Ranks that send or write parts of the tensor."""
        return {box.rank for box in self.boxes} | {*self.owners}

    def runs(self, box: RankBox) -> Runs:
        """Return a box's runs of bytes in the tensor."""
        return box_runs(self.shape, box.offsets, box.sizes, ITEM_BYTES[self.place.dtype])


def gather_columns(plans: Sequence[SavePlan], files: Iterable[PlannedFile]) -> list[Gather]:
    """Return the tensors with boxes of short runs on several ranks, which take turns as owners of bands."""
    boxes = _boxes(plans)
    found = []
    for tensor, place, number in _placed(files):
        holders = sorted({box.rank for box in boxes[tensor.fqn]})
        if len(holders) > 1 and any(_is_scattered(tensor, box) for box in boxes[tensor.fqn]):
            found.append(_gather(number, tensor, place, boxes, partial(_take_turns, holders)))
    return found


def _take_turns(ranks: Sequence[int], cell: int) -> int:
    return ranks[cell % len(ranks)]


def gather_all(plans: Sequence[SavePlan], files: Iterable[PlannedFile], owner_of: OwnerOf) -> list[Gather]:
    """Return all tensors with bytes. `owner_of`: (number of a file, number of its 4 MiB cell) → the writing rank."""
    files, boxes = list(files), _boxes(plans)
    numbers = {file.temporary: number for number, file in enumerate(files)}
    return [
        _gather(number, tensor, place, boxes, partial(owner_of, numbers[place.file]))
        for tensor, place, number in _placed(files)
        if tensor.nbytes
    ]


def cells_of(size: int) -> int:
    """Return the number of a file's cells: aligned ranges of 4 MiB, each written by one rank."""
    return max(1, -(-size // _BAND_BYTES))


def _placed(files: Iterable[PlannedFile]) -> Iterator[tuple[ExportedTensor, TensorPlace, int]]:
    number = 0
    for file in files:
        places = file.places()
        for tensor in file.tensors:
            yield tensor, places[tensor.fqn], number
            number += 1


def _boxes(plans: Sequence[SavePlan]) -> Mapping[str, list[RankBox]]:
    found: dict[str, list[RankBox]] = defaultdict(list)
    for rank, plan in enumerate(plans):
        for item in plan.items:
            chunk = tensor_data_of(item).chunk
            found[item.index.fqn].append(RankBox(rank, tuple(chunk.offsets), tuple(chunk.sizes)))
    return found


def _is_scattered(tensor: ExportedTensor, box: RankBox) -> bool:
    runs = box_runs(tensor.shape, box.offsets, box.sizes, ITEM_BYTES[tensor.dtype])
    return runs.count > 1 and 0 < runs.run_bytes < _SMALL_RUN_BYTES


def _gather(
    number: int,
    tensor: ExportedTensor,
    place: TensorPlace,
    boxes: Mapping[str, list[RankBox]],
    owner_of: Callable[[int], int],
) -> Gather:
    first = place.offset // _BAND_BYTES
    last = -(-(place.offset + tensor.nbytes) // _BAND_BYTES)
    stops = [min((cell + 1) * _BAND_BYTES - place.offset, tensor.nbytes) for cell in range(first, last)]
    owners = [owner_of(cell) for cell in range(first, last)]
    return Gather(number, tensor.fqn, place, tensor.shape, tuple(boxes[tensor.fqn]), tuple(stops), tuple(owners))


@dataclass(frozen=True, slots=True)
class RankPart:
    """What the coordinator sends to a rank as `SavePlan.storage_data`.

    Attributes:
        places: FQN of a rank's item → place of the tensor.
        headers: Temporary name → header that this rank writes.
        gathers: Tensors that this rank sends, writes or gets parts of.
        secret: Secret by which the ranks connect; empty if no rank has `gathers`.
    """

    places: Mapping[str, TensorPlace]
    headers: Mapping[str, bytes]
    gathers: Sequence[Gather] = ()
    secret: bytes = b""


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What the coordinator needs to know of a rank; sent as `storage_data` of the local plan.

    Attributes:
        host: Identity of the rank's host: ranks with the same one share the page cache.
        aliases: Alias → FQN under which the tied tensor is written.
        settings: Options that all ranks must have in common.
    """

    host: str
    aliases: Mapping[str, str]
    settings: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_this_rank(cls, aliases: Mapping[str, str] | None, settings: Mapping[str, str] | None = None) -> RankFacts:
        """Return the facts of this process."""
        me = this_process()
        return cls(me.boot_id or me.host, dict(aliases or {}), dict(settings or {}))

    @classmethod
    def of(cls, plan: SavePlan) -> RankFacts:
        """Return the facts in a plan. Raises DcpError if a planner has removed them."""
        if not isinstance(plan.storage_data, RankFacts):
            raise DcpError("a plan lost its storage data; a planner's create_global_plan must keep it")
        return plan.storage_data


def check_settings(facts: Sequence[RankFacts]) -> None:
    """Raise DcpError if a rank has other options than rank 0."""
    first = facts[0].settings
    for rank, one in enumerate(facts):
        for name, value in one.settings.items():
            if value != first.get(name):
                raise DcpError(
                    f"rank {rank} exports with {name}={value}, and rank 0 with {name}={first.get(name)}: the files are "
                    "one for all ranks, so pass the same on each"
                )


def agreed_aliases(plans: Iterable[SavePlan], facts: Iterable[RankFacts]) -> dict[str, str]:
    """Return the tied tensors that no rank writes, as all ranks hold them: alias → FQN."""
    written: set[str] = set().union(*(columns_of(plan.items).names() for plan in plans))
    ties = {alias: target for one in facts for alias, target in one.aliases.items()}
    return {alias: target for alias, target in ties.items() if alias not in written and target in written}


def distribute(
    plans: Sequence[SavePlan],
    files: Iterable[PlannedFile],
    gathers: Sequence[Gather] = (),
    owners: Mapping[str, int] | None = None,
) -> list[SavePlan]:
    """Return the plans with each rank's `RankPart`.

    `owners` maps a file's temporary name to the rank that writes its header; None: the rank with its first bytes.
    """
    files = list(files)
    places = {fqn: place for file in files for fqn, place in file.places().items()}
    own = [{item.index.fqn: places[item.index.fqn] for item in plan.items} for plan in plans]
    if owners is None:
        owners = _first_writers(plans, places)
    headers: list[dict[str, bytes]] = [{} for _ in plans]
    for file in files:
        headers[owners.get(file.temporary, 0)][file.temporary] = file.header
    shared: list[list[Gather]] = [[] for _ in plans]
    for gather in gathers:
        for rank in gather.ranks:
            shared[rank].append(gather)
    secret = secrets.token_bytes(32) if any(len(gather.ranks) > 1 for gather in gathers) else b""
    parts = zip(own, headers, shared, strict=True)
    return [replace(plan, storage_data=RankPart(*part, secret)) for plan, part in zip(plans, parts, strict=True)]


def _first_writers(plans: Sequence[SavePlan], places: Mapping[str, TensorPlace]) -> dict[str, int]:
    first: dict[str, tuple[int, int]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            place = places[item.index.fqn]
            runs = _runs(item, place)
            if runs.run_bytes:
                begin = place.offset + runs.start
                first[place.file] = min(first.get(place.file, (begin, rank)), (begin, rank))
    return {name: rank for name, (_, rank) in first.items()}


def share_out(
    plans: Sequence[SavePlan], files: Sequence[PlannedFile], hosts: Sequence[str], *, ranges: bool
) -> list[SavePlan]:
    """Return the plans with each rank's `RankPart`: ranks write what they hold, or pass it on where that is better.

    Ranks pass bytes of column shards on. They pass on all bytes if the storage does not write ranges (`ranges`), so
    that each file has one writer, or if hosts would write into one aligned block, which network file systems lose.
    """
    world = len(plans)
    if not ranges:
        owners = {file.temporary: number % world for number, file in enumerate(files)}
        return distribute(plans, files, gather_all(plans, files, lambda file, _: file % world), owners)
    placed = distribute(plans, files, gather_columns(plans, files))
    if host_conflict(placed, hosts) is None:
        return placed
    cells = [cells_of(file.size) for file in files]
    gathers = gather_all(plans, files, lambda file, cell: cell * world // cells[file])
    return distribute(plans, files, gathers, {file.temporary: 0 for file in files})


def host_conflict(plans: Sequence[SavePlan], hosts: Sequence[str]) -> str | None:
    """Return the temporary name of a file with an aligned block that two hosts would write, or None."""
    if len(set(hosts)) < 2:
        return None
    blocks: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for plan, host in zip(plans, hosts, strict=True):
        part: RankPart = plan.storage_data
        for name, header in part.headers.items():
            blocks[name].append((0, -(-len(header) // RangeSink.shared_block_bytes), host))
        for item in plan.items:
            place = part.places[item.index.fqn]
            runs = _runs(item, place)
            begin, end = place.offset + runs.start, place.offset + runs.stop
            if begin < end:
                blocks[place.file].append(
                    (begin // RangeSink.shared_block_bytes, -(-end // RangeSink.shared_block_bytes), host)
                )
    for name, found in blocks.items():
        reached, writer = 0, ""
        for begin, end, host in sorted(found):
            if begin < reached and host != writer:
                return name
            reached, writer = max(reached, end), host
    return None


def _runs(item: WriteItem, place: TensorPlace) -> Runs:
    data = tensor_data_of(item)
    return box_runs(data.size, data.chunk.offsets, data.chunk.sizes, ITEM_BYTES[place.dtype])
