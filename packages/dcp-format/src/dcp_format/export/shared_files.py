"""Files that the ranks of one save share: which rank writes what, and what it passes on to others.

Decided by the coordinator. Not in this module: writing; see `write_files`.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dcp_core import SavePlan, WriteItem
from dcp_core.errors import DcpError
from dcp_format.export.box_writes import BoxRuns
from dcp_format.export.file_map import PlannedFile, TensorPlace
from dcp_format.export.gather_plan import Gather, cells_of, gather_all, gather_columns
from dcp_format.export.items import tensor_data_of
from dcp_io import SHARED_BLOCK_BYTES, this_process
from dcp_manifest import ITEM_BYTES

__all__ = ["RankFacts", "RankPart", "agreed_aliases", "check_settings", "distribute", "host_conflict", "share_out"]


@dataclass(frozen=True, slots=True)
class RankPart:
    """What the coordinator sends to a rank as `SavePlan.storage_data`.

    Attributes:
        places: FQN of each of the rank's items → place of the tensor.
        headers: Temporary name → header, of files whose header this rank writes.
        gathers: Tensors of which this rank sends or writes parts for other ranks, or gets them.
        secret: Secret by which the ranks connect; empty if no rank has `gathers`.
    """

    places: Mapping[str, TensorPlace]
    headers: Mapping[str, bytes]
    gathers: Sequence[Gather] = ()
    secret: bytes = b""


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What the coordinator needs to know of a rank; sent to it as `storage_data` of the local plan.

    Attributes:
        host: Identity of the rank's host: ranks with the same one share the page cache.
        aliases: Tied tensors of the rank: alias → FQN under which the tensor is written.
        settings: Options of the rank that decide about the files, by name; all ranks must have the same.
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
    """Raise DcpError if a rank has other options than the coordinator, rank 0; the message names both."""
    first = facts[0].settings
    for rank, one in enumerate(facts):
        for name, value in one.settings.items():
            if value != first.get(name):
                raise DcpError(
                    f"rank {rank} exports with {name}={value}, and rank 0 with {name}={first.get(name)}: the files are "
                    "one for all ranks, so pass the same on each"
                )


def agreed_aliases(plans: Iterable[SavePlan], facts: Iterable[RankFacts]) -> dict[str, str]:
    """Return the tied tensors that no rank writes, as all ranks hold them: alias → FQN of the tensor."""
    written: set[str] = set().union(*(plan.names() for plan in plans))
    ties = {alias: target for one in facts for alias, target in one.aliases.items()}
    return {alias: target for alias, target in ties.items() if alias not in written and target in written}


def distribute(
    plans: Sequence[SavePlan],
    files: Iterable[PlannedFile],
    gathers: Sequence[Gather] = (),
    owners: Mapping[str, int] | None = None,
) -> list[SavePlan]:
    """Return the plans with each rank's `RankPart`.

    Args:
        plans: Final plans of all ranks.
        files: The files.
        gathers: Tensors whose parts ranks pass on to each other.
        owners: Temporary name of a file → rank that writes its header; None for the rank with the file's first bytes.
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
            begin = place.offset + _runs(item, place).extent[0]
            first[place.file] = min(first.get(place.file, (begin, rank)), (begin, rank))
    return {name: rank for name, (_, rank) in first.items()}


def share_out(
    plans: Sequence[SavePlan], files: Sequence[PlannedFile], hosts: Sequence[str], *, ranges: bool
) -> list[SavePlan]:
    """Return the plans with each rank's `RankPart`: ranks write what they hold, or pass it on where that is better.

    Ranks pass bytes on if a tensor is sharded by columns; all bytes if the storage does not write ranges, where each
    file has one writer, or if hosts would write into one aligned block of a file, which network file systems lose.

    Args:
        plans: Final plans of all ranks.
        files: The files.
        hosts: Identity of each rank's host.
        ranges: `Store.writes_ranges`.
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
    """Return the temporary name of a file of which an aligned block would be written by two hosts; None if none is.

    Args:
        plans: Plans from `distribute`.
        hosts: Identity of each rank's host.
    """
    if len(set(hosts)) < 2:
        return None
    blocks: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for plan, host in zip(plans, hosts, strict=True):
        part: RankPart = plan.storage_data
        for name, header in part.headers.items():
            blocks[name].append((0, -(-len(header) // SHARED_BLOCK_BYTES), host))
        for item in plan.items:
            place = part.places[item.index.fqn]
            begin, end = (place.offset + at for at in _runs(item, place).extent)
            if begin < end:
                blocks[place.file].append((begin // SHARED_BLOCK_BYTES, -(-end // SHARED_BLOCK_BYTES), host))
    for name, found in blocks.items():
        reached, writer = 0, ""
        for begin, end, host in sorted(found):
            if begin < reached and host != writer:
                return name
            reached, writer = max(reached, end), host
    return None


def _runs(item: WriteItem, place: TensorPlace) -> BoxRuns:
    data = tensor_data_of(item)
    return BoxRuns(data.size, data.chunk.offsets, data.chunk.sizes, ITEM_BYTES[place.dtype])
