"""`dcp du`: the disk space of checkpoints by run, step and part, and what policies would free."""

from __future__ import annotations

import contextlib
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from dcp_inspect.arguments import PLACE, is_uri, open_folder
from dcp_inspect.contents import rows_of
from dcp_inspect.errors import UNREADABLE
from dcp_inspect.examples import examples
from dcp_inspect.listing import Listed, find, look_at_all
from dcp_inspect.printing.output import count_bytes, json_option, print_json, print_line
from dcp_inspect.printing.table import print_table
from dcp_io import CheckpointRecord, HostStore, KeepLast, KeepPolicy, Store
from dcp_io.checkpoints.drop_parts import SmallerCheckpoint
from dcp_manifest import CheckpointNotFoundError, FoundCheckpoint, index_of
from dcp_manifest.index.columns import needed_bytes

_REST = "(index, notes, padding)"
_USUAL = (KeepLast(1), KeepLast(3))

_Identity = tuple[object, ...]


class _Policy(click.ParamType[KeepPolicy]):
    name = "policy"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> KeepPolicy:
        try:
            return value if isinstance(value, KeepPolicy) else KeepPolicy.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command(
    "du",
    epilog=examples(
        "dcp du runs",
        "dcp du runs --keep 'KeepLast(2) | KeepEvery(1000)'",
        "dcp du s3://bucket/runs --depth 1 --json",
    ),
)
@click.argument("path", type=PLACE, default=".")
@click.option(
    "--keep", type=_Policy(), multiple=True, metavar="POLICY", help="Say what this policy would free; may be repeated."
)
@click.option("--depth", type=click.IntRange(1), default=2, show_default=True, help="Levels of names in a part.")
@json_option
def command(path: str, keep: tuple[KeepPolicy, ...], depth: int, as_json: bool) -> int:
    """Show the disk space of the checkpoints in PATH and below, by step, by run and by part of the state.

    `own` is the space that the removal of that checkpoint alone would free. Totals count files with several hard links
    once. A part is the first levels of the values' names, such as app.model. Sizes are lengths of files; files that no
    save wrote are not counted.

    The last table shows how much each keep policy would free, written as for the manager. No policy removes a run's
    newest complete checkpoint, incomplete checkpoints, checkpoints without a step, or those to which a symbolic link
    points. This command removes nothing. The exit code is 4 if something cannot be read.
    """
    found = find(path, unfinished=True)
    listed = [*look_at_all(found, path)]
    if not found:
        raise CheckpointNotFoundError(f"there is no checkpoint in {path} or below")
    used = [_Used.of(*each, depth) for each in zip(found, listed, strict=True)]
    policies = [(policy.text(), *_removed(policy, used)) for policy in keep or _USUAL]
    if as_json:
        print_json(_as_json(path, used, policies))
    else:
        _print(used, policies)
    return UNREADABLE if any(one.unreadable for one in listed) else 0


@dataclass(frozen=True, slots=True)
class _File:
    bytes: int
    names: int = 1
    """In this checkpoint."""
    links: int = 1
    """Everywhere; one more if a name is a symbolic link, since its removal frees nothing."""


@dataclass(frozen=True, slots=True)
class _Used:
    found: FoundCheckpoint[Any]
    listed: Listed
    files: dict[_Identity, _File]
    parts: dict[str, int]
    linked: bool = False

    @property
    def run(self) -> str:
        return "/".join(self.found.place.run) or "."

    @classmethod
    def of(cls, found: FoundCheckpoint[Any], listed: Listed, depth: int) -> _Used:
        if listed.unreadable:
            return cls(found, listed, {}, {})
        sizes = {entry.name: entry.bytes for entry in found.store.list()}
        parts: dict[str, int] = defaultdict(int)
        if listed.complete:
            index = index_of(found.store)
            for name in needed_bytes(index).keys() - sizes.keys():  # in directories below
                sizes[name] = found.store.size(name)
            for row in rows_of(index):
                parts[".".join(row.name.split(".")[:depth])] += row.stored_bytes
        files = _identified(listed.path, sizes)
        parts[_REST] = _bytes_of([files]) - sum(parts.values())
        return cls(found, listed, files, dict(parts), linked=listed.complete and bool(found.links()))


def _identified(path: str, sizes: Mapping[str, int]) -> dict[_Identity, _File]:
    if is_uri(path):
        return {(path, name): _File(size) for name, size in sizes.items()}
    files: dict[_Identity, _File] = {}
    for name in sizes:
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            place = os.path.join(path, name)
            facts = os.stat(place)
            known = files.get((facts.st_dev, facts.st_ino))
            count = 1 if known is None else known.names + 1
            files[facts.st_dev, facts.st_ino] = _File(facts.st_size, count, facts.st_nlink + os.path.islink(place))
    return files


def _bytes_of(files: Iterable[Mapping[_Identity, _File]]) -> int:
    return sum(file.bytes for file in {key: file for some in files for key, file in some.items()}.values())


def _freed(removed: Iterable[_Used]) -> int:
    names: Counter[_Identity] = Counter()
    files: dict[_Identity, _File] = {}
    for one in removed:
        for key, file in one.files.items():
            names[key] += file.names
            files[key] = file
    return sum(file.bytes for key, file in files.items() if names[key] >= file.links)


def _removed(policy: KeepPolicy, used: Sequence[_Used]) -> tuple[list[_Used], int]:
    runs: dict[tuple[str, ...], list[_Used]] = defaultdict(list)
    for one in used:
        if one.listed.complete and one.found.place.step is not None:
            runs[one.found.place.series].append(one)
    removed: list[_Used] = []
    of_parts = 0
    for checkpoints in runs.values():
        records = {}
        for one in checkpoints:
            step, listed = one.found.place.step or 0, one.listed
            created = (listed.created_ns or 0) / 1e9 or listed.modified_seconds
            records[step] = CheckpointRecord(step, created, listed.notes.metrics)
        linked = {one.found.place.step or 0 for one in checkpoints if one.linked}
        kept = policy.select([*records.values()], {max(records), *linked}, lambda _: True)
        removed += [one for one in checkpoints if one.found.place.step not in kept]
        for one in checkpoints:
            if parts := kept.get(one.found.place.step or 0):
                of_parts += _freed_by_parts(open_folder(one.listed.path), parts)
    return removed, _freed(removed) + of_parts


def _freed_by_parts(store: Store, keep: tuple[str, ...]) -> int:
    """Return what the removal of all other parts frees: nothing where a manager leaves a checkpoint whole."""
    if isinstance(store, HostStore):
        return 0
    smaller = SmallerCheckpoint(store, keep=keep)
    return 0 if smaller.is_empty or smaller.unknown else smaller.bytes


def _parts(used: Sequence[_Used]) -> list[tuple[str, int]]:
    parts: Counter[str] = Counter()
    for one in used:
        parts.update(one.parts)
    return parts.most_common()


def _runs(used: Sequence[_Used]) -> dict[str, list[_Used]]:
    runs: dict[str, list[_Used]] = defaultdict(list)
    for one in used:
        runs[one.run].append(one)
    return dict(sorted(runs.items()))


def _as_json(path: str, used: Sequence[_Used], policies: Sequence[tuple[str, list[_Used], int]]) -> dict[str, object]:
    return {
        "path": path,
        "bytes": _bytes_of(one.files for one in used),
        "checkpoints": [
            {
                "path": one.listed.path,
                "run": one.run,
                "step": one.listed.step,
                "bytes": _bytes_of([one.files]),
                "own_bytes": _freed([one]),
                "parts": one.parts,
                "problem": one.listed.problem,
            }
            for one in used
        ],
        "runs": {
            run: {"bytes": _bytes_of(one.files for one in some), "own_bytes": _freed(some)}
            for run, some in _runs(used).items()
        },
        "parts": dict(_parts(used)),
        "policies": {
            text: {"removes": [one.listed.path for one in removed], "frees_bytes": freed}
            for text, removed, freed in policies
        },
    }


def _print(used: Sequence[_Used], policies: Sequence[tuple[str, list[_Used], int]]) -> None:
    sizes = ("size", "own")
    rows = [
        (one.listed.path, count_bytes(_bytes_of([one.files])), count_bytes(_freed([one])), one.listed.problem or "")
        for one in used
    ]
    print_table(("checkpoint", *sizes, ""), rows, right=sizes)
    runs = _runs(used)
    if len(runs) > 1:
        print_line("")
        by_run = [
            (run, str(len(some)), count_bytes(_bytes_of(one.files for one in some)), count_bytes(_freed(some)))
            for run, some in runs.items()
        ]
        print_table(("run", "checkpoints", *sizes), by_run, right=("checkpoints", *sizes))
    print_line("")
    whole = _bytes_of(one.files for one in used)
    parts = _parts(used)
    total = sum(size for _, size in parts) or 1
    by_part = [(name, count_bytes(size), f"{size / total:.0%}") for name, size in parts]
    print_table(("part", "size", "share"), by_part, right=("size", "share"))
    print_line("")
    by_policy = [(text, str(len(removed)), count_bytes(freed)) for text, removed, freed in policies]
    print_table(("policy", "removes", "frees"), by_policy, right=("removes", "frees"))
    shared = "" if whole == total else f", {count_bytes(total)} without sharing"
    print_line("")
    print_line(f"{count_bytes(whole)} in {len(used)} checkpoint{'s' * (len(used) != 1)}{shared}")
