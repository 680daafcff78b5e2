"""Choice of the current index in a folder.

Saves without a coordinator write rank-local indexes: `__<rank>.metadata` (overwritten by each save) and
`__<rank>.<save id>.metadata`. They count only if all ranks of one save have one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from dcp_base.errors import DcpError
from dcp_manifest.errors import CheckpointNotFoundError, CorruptCheckpointError
from dcp_manifest.file.manifest_read import read_index
from dcp_manifest.folders.folder import METADATA_NAME, Entry, Folder, RankIndexName, is_index_name, rank_index_name
from dcp_manifest.index.columns import CheckpointIndex, ManifestInfo
from dcp_manifest.index.merge_indexes import merge_rank_indexes

Load = Callable[[str], CheckpointIndex]
# An index may be replaced between listing and reading, repeatedly: after so many tries there is none.
_TRIES = 5


@dataclass(frozen=True, slots=True)
class _Candidate:
    mtime: float
    generation: int | None
    """None if stock wrote it, or for damage."""
    created_ns: int
    load: Callable[[], CheckpointIndex]


def current_index(
    folder: Folder, entries: Sequence[Entry] | None = None, load: Callable[[Entry], CheckpointIndex] | None = None
) -> CheckpointIndex | None:
    """Return a folder's newest complete index; None without an index file. Errors: see `choose_index`.

    `load` reads an index file; without it, `read_index` does.
    """
    missing: CheckpointNotFoundError | None = None
    tried: dict[str, float] = {}
    for _ in range(_TRIES + 1):
        listed = folder.list() if entries is None else entries
        found = {entry.name: entry for entry in listed if is_index_name(entry.name)}
        times = {name: entry.mtime for name, entry in found.items()}
        if not times:
            return None
        if missing is not None and times.keys() == tried.keys():
            raise missing
        try:
            return choose_index(times, partial(_read, folder, load, found))
        except CheckpointNotFoundError as error:
            # No set is complete, or a file was removed between listing and reading.
            missing, tried, entries = error, times, None
    if missing is not None:
        raise missing
    return None


def _read(
    folder: Folder, load: Callable[[Entry], CheckpointIndex] | None, entries: Mapping[str, Entry], name: str
) -> CheckpointIndex:
    return read_index(folder.read(name), file=name) if load is None else load(entries[name])


def choose_index(entries: Mapping[str, float], load: Load) -> CheckpointIndex:
    """Return the newest complete index among the files in `entries` (name → modification time).

    The index with the higher generation is newer; of equal generations, the index of the later save; if either number
    is unknown, the file with the later modification time. A damaged index is an error: no older index is used instead.

    `load` returns a file's index. Raises the errors of `load` for the newest index, and CheckpointNotFoundError, with
    the ranks that lack indexes, if all are incomplete.
    """
    of_ranks = {name: found for name in entries if (found := rank_index_name(name)) is not None}
    if METADATA_NAME in entries and not of_ranks:
        return load(METADATA_NAME)
    missing: list[str] = []
    candidates = []
    if METADATA_NAME in entries:
        candidates.append(_candidate(entries[METADATA_NAME], lambda: load(METADATA_NAME)))
    candidates += _rank_sets(of_ranks, entries, load, missing)
    if not candidates:
        detail = f": {'; '.join(missing)}" if missing else ""
        files = "1 file" if len(entries) == 1 else f"{len(entries)} files"
        raise CheckpointNotFoundError(f"there is no complete index among {files}{detail}")
    best = candidates[0]
    for candidate in candidates[1:]:
        if _is_newer(candidate, best):
            best = candidate
    return best.load()


def _is_newer(one: _Candidate, other: _Candidate) -> bool:
    if one.generation is not None and other.generation is not None and one.generation != other.generation:
        return one.generation > other.generation
    if one.created_ns and other.created_ns and one.created_ns != other.created_ns:
        return one.created_ns > other.created_ns
    return one.mtime > other.mtime


def _candidate(mtime: float, load: Callable[[], CheckpointIndex]) -> _Candidate:
    try:
        index = load()
    except CheckpointNotFoundError:
        raise
    except DcpError as error:
        return _Candidate(mtime, None, 0, _raiser(error))
    info = index.info
    generation, created_ns = (None, 0) if info is None else (info.generation, info.created_ns)
    return _Candidate(mtime, generation, created_ns, lambda: index)


def _raiser(error: DcpError) -> Callable[[], CheckpointIndex]:
    def load() -> CheckpointIndex:
        raise error

    return load


def _rank_sets(
    of_ranks: Mapping[str, RankIndexName], entries: Mapping[str, float], load: Load, missing: list[str]
) -> Iterator[_Candidate]:
    named: dict[str, dict[int, str]] = {}
    plain: dict[int, str] = {}
    for name, found in of_ranks.items():
        ranks = plain if found.save_id is None else named.setdefault(found.save_id, {})
        ranks[found.rank] = name
    complete = set()
    for save_id, files in named.items():
        for candidate in _named_set(save_id, files, entries, load, missing):
            complete.add(save_id)
            yield candidate
    if plain:
        yield from _plain_set(plain, entries, load, complete, missing)


def _named_set(
    save_id: str, files: dict[int, str], entries: Mapping[str, float], load: Load, missing: list[str]
) -> Iterator[_Candidate]:
    mtime = max(entries[name] for name in files.values())
    first = min(files)
    probe = _candidate(mtime, lambda: _rank_index(files[first], save_id, first, load))
    if probe.generation is None:
        yield probe
        return
    info = _info(probe.load())
    if _is_complete(files, info.world_size, f"save {save_id}", missing):
        names = [files[rank] for rank in range(info.world_size)]

        def merged() -> CheckpointIndex:
            return _merged([_rank_index(name, save_id, rank, load) for rank, name in enumerate(names)])

        yield replace(probe, load=merged)


def _is_complete(files: Mapping[int, str], world_size: int, what: str, missing: list[str]) -> bool:
    lacking = world_size - sum(rank < world_size for rank in files)
    if lacking:
        some = [rank for rank in range(min(world_size, len(files) + 8)) if rank not in files][:8]
        missing.append(f"{what} lacks the indexes of {lacking} of {world_size} ranks, such as {some}")
    return not lacking


def _rank_index(name: str, save_id: str | None, rank: int, load: Load) -> CheckpointIndex:
    index = load(name)
    info = index.info
    if info is not None and (info.rank != rank or (save_id is not None and info.save_id != save_id)):
        raise CorruptCheckpointError(
            f"the index is that of rank {info.rank} in save {info.save_id}: the file was renamed or swapped",
            file=name,
        )
    if info is None and save_id is not None:
        raise CorruptCheckpointError("the index has lost its manifest; restore the file from a copy", file=name)
    return index


def _info(index: CheckpointIndex) -> ManifestInfo:
    if index.info is None:
        raise CorruptCheckpointError("the index has no save id")
    return index.info


def _plain_set(
    files: dict[int, str], entries: Mapping[str, float], load: Load, complete: set[str], missing: list[str]
) -> Iterator[_Candidate]:
    """A copy of a set with a save id is skipped."""
    mtime = max(entries[name] for name in files.values())
    first = min(files)
    probe = _candidate(mtime, lambda: _rank_index(files[first], None, first, load))
    try:
        info = probe.load().info
    except DcpError:
        yield probe
        return
    if info is not None and info.save_id in complete:
        return
    # Stock does not record the world size.
    world_size = max(files) + 1 if info is None else info.world_size
    if not _is_complete(files, world_size, "the set of __<rank>.metadata", missing):
        return
    names = [files[rank] for rank in range(world_size)]
    ids = []
    indexes = []
    for rank, name in enumerate(names):
        index = _rank_index(name, None, rank, load)
        indexes.append(index)
        ids.append(None if index.info is None else index.info.save_id)
    if len(set(ids)) > 1:
        missing.append("the indexes __<rank>.metadata belong to different saves")
        return
    yield replace(probe, load=lambda: _merged(indexes))


def _merged(indexes: list[CheckpointIndex]) -> CheckpointIndex:
    sizes = {_info(index).world_size for index in indexes if index.info is not None}
    if len(sizes) > 1:
        raise CorruptCheckpointError(f"the ranks' indexes disagree on the world size: {sorted(sizes)}")
    return merge_rank_indexes(indexes)
