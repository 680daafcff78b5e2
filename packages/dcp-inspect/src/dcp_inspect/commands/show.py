"""`dcp show`: print the names in a checkpoint as a tree, from its index alone unless statistics are requested."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from dcp_inspect.contents import Row, open_index, rows_of, select
from dcp_inspect.errors import MissingValueError
from dcp_inspect.examples import examples
from dcp_inspect.places import PLACE
from dcp_inspect.printing.output import count_bytes, json_option, print_json, print_line, print_lines
from dcp_inspect.printing.suggestions import hint
from dcp_inspect.printing.table import print_table
from dcp_inspect.printing.tree import tree_lines
from dcp_inspect.reading.arrays import array_of, is_number
from dcp_inspect.reading.small_objects import with_values
from dcp_manifest import CheckpointIndex, UnsupportedFormatError

__all__ = ["command"]

_SHOWN_LETTERS = 60


@click.command(
    "show",
    epilog=examples(
        "dcp show runs/step-100",
        "dcp show runs/step-100 --depth 2",
        "dcp show runs/step-100 'model.*' --stats",
        "dcp show model.safetensors",
        "dcp show s3://bucket/runs/step-100 --json",
    ),
)
@click.argument("path", type=PLACE)
@click.argument("patterns", nargs=-1)
@click.option("--flat", is_flag=True, help="One line per value instead of a tree.")
@click.option("--depth", type=click.IntRange(1), help="Show so many levels of the tree; deeper ones are summed up.")
@click.option("--stats", is_flag=True, help="Read the values: smallest, largest, mean, deviation, not finite.")
@json_option
def command(path: str, patterns: tuple[str, ...], flat: bool, depth: int | None, stats: bool, as_json: bool) -> int:
    """Show the names, dtypes, shapes and sizes in a checkpoint; PATTERNS (like 'model.*') select among them."""
    index, rows = _rows(path)
    chosen = select(rows, patterns)
    if patterns and not chosen:
        meant = hint(path, patterns[0], [row.name for row in rows])
        raise MissingValueError(
            f"no name in {path} matches {' or '.join(map(repr, patterns))}{meant}; `dcp show {path}` lists all"
        )
    if index is not None:
        chosen = with_values(path, index, chosen)
    found = statistics(path, chosen) if stats else {}
    if as_json:
        values = [{**row.as_json(), **({"stats": found[row.name]} if row.name in found else {})} for row in chosen]
        print_json({"path": path, **_facts(index), "values": values})
        return 0
    print_line((path, "bold"), f": {_summary(index, rows)}")
    if flat or patterns or stats:
        _table(chosen, found)
    else:
        print_lines(tree_lines(((row.name, row.bytes, _form(row)) for row in chosen), depth))
    return 0


def _rows(path: str) -> tuple[CheckpointIndex | None, list[Row]]:
    """Return the rows of a checkpoint, or of a file of another format if dcp-format is installed."""
    try:
        index = open_index(path)
    except UnsupportedFormatError:
        if os.path.isdir(path) and (Path(path) / ".metadata").exists():
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
        "created_ns": info.created_ns,
        "user": dict(info.user),
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
    """Format dtype, shape, chunks and size as short text."""
    if row.kind == "alias":
        return f"= {row.target}"
    if row.kind == "object":
        value = "" if row.value is None else f"{_short(row.value)}  "
        return f"object  {value}{count_bytes(row.bytes)}"
    shape = " × ".join(map(str, row.shape or ())) or "scalar"
    chunks = f"  {row.chunks} chunks" if row.chunks != 1 else ""
    rank = f"  of rank {row.rank}" if row.rank is not None else ""
    return f"{row.dtype}  {shape}{chunks}  {count_bytes(row.bytes)}{rank}"


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
    return (*facts, *measured, *(_short(row.value or "") for _ in values))


def statistics(path: str, rows: list[Row]) -> dict[str, dict[str, float]]:
    """Compute statistics of each tensor in pieces: minimum, maximum, mean, standard deviation, non-finite values."""
    from dcp_inspect.reading.values import open_values  # noqa: PLC0415 - takes torch

    content = open_values(path)
    wanted = [row.name for row in rows if row.name in content.tensors and is_number(content.tensors[row.name].dtype)]
    found = {name: _statistics(content.tensors[name]) for name in wanted}
    content.close()
    return found


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
