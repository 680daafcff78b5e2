"""`dcp show`: print the names in a checkpoint as a tree."""

from __future__ import annotations

import contextlib
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from dcp_base import DcpError
from dcp_inspect.arguments import PLACE, is_uri
from dcp_inspect.contents import Row, folder_of, open_index, rows_of, select
from dcp_inspect.errors import DIFFERENT, first_line, in_options, known, worst
from dcp_inspect.examples import examples
from dcp_inspect.listing import Notes, notes_on
from dcp_inspect.printing.output import count_bytes, json_option, metrics_text, print_json, print_line, print_lines, say
from dcp_inspect.printing.suggestions import hint
from dcp_inspect.printing.table import print_table
from dcp_inspect.printing.tree import tree_lines
from dcp_inspect.reading.values import array_of, is_number
from dcp_io import open_store
from dcp_io.archives.stored_objects import outline_of_tensor, read_plain_object
from dcp_io.reading.stored_reader import StoredReader
from dcp_manifest import (
    CheckpointIndex,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FoundCheckpoint,
    LocalFolder,
    StoredItem,
    UnsupportedFormatError,
    stored_tensors,
)
from dcp_manifest.folders.folder import METADATA_NAME, NOTE, QUARANTINE
from dcp_manifest.index.columns import ItemKind
from dcp_manifest.index.stored_tensors import stored_objects

_SHOWN_LETTERS = 60


@click.command(
    "show",
    epilog=examples(
        "dcp show runs/step-100",
        "dcp show runs/step-100 --depth 2",
        "dcp show runs/step-100 'model.*' --stats",
        "dcp show runs/step-100 runs/step-200 --depth 1",
        "dcp show model.safetensors",
        "dcp show s3://bucket/runs/step-100 --json",
    ),
)
@click.argument("path", type=PLACE)
@click.argument("more", nargs=-1, metavar="[PATH|PATTERN]...")
@click.option("--flat", is_flag=True, help="One line per value instead of a tree.")
@click.option("--depth", type=click.IntRange(1), help="Show so many levels of the tree; deeper ones are summed up.")
@click.option("--stats", is_flag=True, help="Read the values: smallest, largest, mean, deviation, not finite.")
@json_option
def command(path: str, more: tuple[str, ...], flat: bool, depth: int | None, stats: bool, as_json: bool) -> int:
    """Show the names, dtypes, shapes and sizes in a checkpoint; PATTERNS (like 'model.*') select among them.

    Arguments that name another checkpoint, a file or a URI are shown; all others are patterns.
    """
    paths = [path, *filter(_is_place, more)]
    patterns = tuple(each for each in more if not _is_place(each))
    shown: list[dict[str, object]] = []
    codes: list[int] = []
    for each in dict.fromkeys(paths):
        try:
            one = _Shown(each, patterns, stats=stats)
        except Exception as error:
            if len(paths) == 1:
                raise
            code, message = known(error)
            say(f"dcp: {in_options(message)}", err=True)
            codes.append(code)
            continue
        codes.append(one.code)
        if as_json:
            shown.append(one.as_json())
        else:
            one.print(flat=flat or bool(patterns) or stats, depth=depth)
    if as_json:
        print_json(shown[0] if len(paths) == 1 else {"checkpoints": shown})
    return worst(codes)


def _is_place(text: str) -> bool:
    if is_uri(text):
        return True
    return (
        os.path.isfile(text)
        or os.path.isfile(os.path.join(text, METADATA_NAME))
        or (os.sep in text and os.path.isdir(text))
    )


class _Shown:
    def __init__(self, path: str, patterns: tuple[str, ...], *, stats: bool) -> None:
        self._path = path
        self._index, self._rows = _rows(path)
        self._chosen = select(self._rows, patterns)
        if patterns and not self._chosen:
            meant = hint(path, patterns[0], [row.name for row in self._rows])
            raise CheckpointNotFoundError(
                f"no name in {path} matches {' or '.join(map(repr, patterns))}{meant}; `dcp show {path}` lists all"
            )
        self._notes = Notes()
        if self._index is not None:
            self._chosen = _with_values(path, self._index, self._chosen)
            self._notes = _notes(path)
        self._stats, self._damaged = statistics(path, self._chosen) if stats else ({}, {})

    @property
    def code(self) -> int:
        return DIFFERENT if self._damaged else 0

    def as_json(self) -> dict[str, object]:
        values = []
        for row in self._chosen:
            measured = {"stats": self._stats[row.name]} if row.name in self._stats else {}
            damage = {"damage": self._damaged[row.name]} if row.name in self._damaged else {}
            values.append({**row.as_json(), **measured, **damage})
        return {"path": self._path, **_facts(self._index), **self._notes.as_json(), "values": values}

    def print(self, *, flat: bool, depth: int | None) -> None:
        print_line((self._path, "bold"), f": {_summary(self._index, self._rows)}")
        if self._notes.quarantine_text is not None:
            print_line(
                (self._notes.quarantine_text, "red"), f"; `dcp unquarantine {self._path}` lifts it after a repair"
            )
        dropped = {} if self._index is None or self._index.info is None else self._index.info.dropped
        for part, reason in dropped.items():
            print_line(("removed", "yellow"), f" since the save: {part} ({reason})")
        if self._notes.metrics:
            print_line(metrics_text(self._notes.metrics, before="metrics: "))
        if flat:
            _table(self._chosen, self._stats)
        else:
            print_lines(tree_lines(((row.name, row.bytes, _form(row)) for row in self._chosen), depth))
        for problem in self._damaged.values():
            print_line(("damaged", "red"), f"  {problem}")


def _notes(path: str) -> Notes:
    folder = folder_of(path)
    store = open_store(folder) if is_uri(folder) else LocalFolder(folder)
    names = {entry.name for entry in store.list()}
    found: FoundCheckpoint[Any] = FoundCheckpoint(store, 0.0, notes=frozenset(names & {NOTE, QUARANTINE}))
    return notes_on(found)


def _rows(path: str) -> tuple[CheckpointIndex | None, list[Row]]:
    try:
        index = open_index(path)
    except UnsupportedFormatError:
        if os.path.isdir(path) and (Path(path) / METADATA_NAME).exists():
            raise
        from dcp_inspect.reading.values import open_values  # noqa: PLC0415 - takes torch

        content = open_values(path)
        rows = [
            Row(name, "tensor", entry.dtype, entry.shape, 1, entry.data.nbytes, entry.data.nbytes)
            for name, entry in content.tensors.items()
        ]
        rows += [Row(name, "object") for name in content.objects]
        rows += [Row(name, "alias", target=target) for name, target in content.aliases.items()]
        content.close()
        return None, rows
    return index, [*rows_of(index)]


def _facts(index: CheckpointIndex | None) -> dict[str, object]:
    info = None if index is None else index.info
    if info is None:
        return {"save_id": None, "world_size": None, "writer": None}
    return {
        "save_id": info.save_id,
        "world_size": info.world_size,
        "writer": info.writer,
        "generation": info.generation,
        "created_ns": info.created_ns or None,
        "user": dict(info.user),
        "dropped": info.dropped,
    }


def _summary(index: CheckpointIndex | None, rows: list[Row]) -> str:
    kinds = Counter(row.kind for row in rows)
    parts = [f"{count} {kind}{'s' if count != 1 and kind != 'alias' else 'es' if count != 1 else ''}"
             for kind, count in kinds.items()]  # fmt: skip
    parts.append(count_bytes(sum(row.bytes for row in rows)))
    info = None if index is None else index.info
    if info is not None:
        parts.append(f"{info.world_size} rank{'s' if info.world_size != 1 else ''}")
        parts.append(f"written by {info.writer}")
    elif index is not None:
        parts.append("written by torch.distributed.checkpoint")
    return ", ".join(parts)


def _form(row: Row) -> str:
    if row.kind == "alias":
        return f"= {row.target}"
    if row.kind == "object":
        value = "" if row.value is None else f"{_short(row.value)}  "
        return f"object  {value}{count_bytes(row.bytes)}"
    shape = " × ".join(map(str, row.shape or ())) or "scalar"
    chunks = f"  {row.chunks} chunks" if row.chunks != 1 else ""
    rank = f"  of rank {row.rank}" if row.rank is not None else ""
    inner = f"  {row.value}" if row.value else ""
    return f"{row.dtype}  {shape}{chunks}  {count_bytes(row.bytes)}{rank}{inner}"


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_LETTERS else text[: _SHOWN_LETTERS - 1] + "…"


def _table(rows: list[Row], found: dict[str, dict[str, float]]) -> None:
    measures = ("min", "max", "mean", "std", "nonfinite") if found else ()
    values = ("value",) if any(row.value is not None for row in rows) else ()
    columns = ("name", "dtype", "shape", "chunks", "size", *measures, *values)
    print_table(
        columns,
        (_cells(row, found.get(row.name, {}), measures, values) for row in rows),
        right=columns[3 : 5 + len(measures)],
        drop=("chunks", "std", "nonfinite", "shape", "dtype", "mean"),
        wrap=values,
    )


def _cells(row: Row, stats: dict[str, float], measures: Sequence[str], values: Sequence[str]) -> tuple[str, ...]:
    shape = "" if row.shape is None else "×".join(map(str, row.shape)) or "scalar"
    kind = row.dtype or (f"= {row.target}" if row.kind == "alias" else row.kind)
    facts = (row.name, kind, shape, str(row.chunks or ""), count_bytes(row.bytes))
    measured = (f"{stats[name]:.4g}" if name in stats else "" for name in measures)
    value = row.value or ""
    return (*facts, *measured, *(value if row.kind == "tensor" else _short(value) for _ in values))


def statistics(path: str, rows: list[Row]) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Return statistics by tensor name, and a message for each damaged tensor."""
    from dcp_inspect.reading.values import open_values  # noqa: PLC0415 - takes torch

    content = open_values(path)
    found: dict[str, dict[str, float]] = {}
    damaged: dict[str, str] = {}
    for name in (row.name for row in rows if row.name in content.tensors):
        if is_number(content.tensors[name].dtype):
            try:
                found[name] = _statistics(content.tensors[name])
            except CorruptCheckpointError as error:
                damaged[name] = f"{path}: {first_line(error)}"
    content.close()
    return found, damaged


def _statistics(entry: Any) -> dict[str, float]:
    count = nonfinite = 0
    total = squares = 0.0
    low, high = math.inf, -math.inf
    for piece in entry.data.pieces(16 << 20):
        elements = array_of(piece, entry.dtype)
        with np.errstate(all="ignore"):
            values = (np.abs(elements) if elements.dtype.kind == "c" else elements).astype(np.float64)
            finite = values[np.isfinite(values)]
            nonfinite += values.size - finite.size
            if finite.size:
                low, high = min(low, float(finite.min())), max(high, float(finite.max()))
                total, squares = total + float(finite.sum()), squares + float(np.square(finite).sum())
                count += finite.size
    if not count:
        return {"nonfinite": nonfinite}
    mean = total / count
    deviation = math.sqrt(max(0.0, squares / count - mean * mean))
    return {"min": low, "max": high, "mean": mean, "std": deviation, "nonfinite": nonfinite}


_SMALL_OBJECT_BYTES = 4096
_MAX_VALUES = 1000
_SMALL_TENSOR_BYTES = 16 << 20
_MAX_TENSORS = 100


def _with_values(path: str | os.PathLike[str], index: CheckpointIndex, rows: Sequence[Row]) -> list[Row]:
    small = {row.name for row in rows if row.kind == "object" and row.stored_bytes <= _SMALL_OBJECT_BYTES}
    items = (
        {name: item for name, item in stored_objects(index) if name in small and item.kind is ItemKind.ARCHIVE}
        if 0 < len(small) <= _MAX_VALUES
        else {}
    )
    values = {**_plain_values(path, items), **_classes_of_tensors(path, index, rows)}
    return [replace(row, value=values.get(row.name)) if row.name in values else row for row in rows]


def _classes_of_tensors(path: str | os.PathLike[str], index: CheckpointIndex, rows: Sequence[Row]) -> dict[str, str]:
    if index.info is None and len(rows) > _MAX_TENSORS:  # in PyTorch's checkpoints, every tensor is an archive
        return {}
    wanted = {row.name for row in rows if row.kind == "tensor"}
    firsts = ((each.name, each.chunks[0].item) for each in stored_tensors(index) if each.name in wanted and each.chunks)
    archives = ((name, item) for name, item in firsts if item.kind is ItemKind.ARCHIVE)
    items = {name: item for name, item in archives if item.stored_bytes <= _SMALL_TENSOR_BYTES}
    found: dict[str, str] = {}
    with contextlib.suppress(DcpError, OSError):
        reader = StoredReader(open_store(folder_of(path)))
        for name, data in reader.whole(dict(list(items.items())[:_MAX_TENSORS])).items():
            with contextlib.suppress(ValueError):
                if (text := outline_of_tensor(bytes(data))) is not None:
                    found[name] = text
    return found


def _plain_values(path: str | os.PathLike[str], items: Mapping[str, StoredItem]) -> dict[str, str]:
    if not items:
        return {}
    found: dict[str, str] = {}
    try:
        stored = StoredReader(open_store(folder_of(path))).whole(items)
    except (DcpError, OSError):  # `verify` reports the damage
        return found
    for name, data in stored.items():
        with contextlib.suppress(ValueError):  # of a class, or with a tensor in it
            found[name] = repr(read_plain_object(bytes(data)))
    return found
