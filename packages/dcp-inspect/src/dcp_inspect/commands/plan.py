"""`dcp plan`: show what each rank of a job would read and write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from dcp_inspect.arguments import LOCAL_FILE, PLACE
from dcp_inspect.contents import open_index
from dcp_inspect.examples import examples
from dcp_inspect.layout import RankLoad, plan_reads, plan_writes
from dcp_inspect.printing.output import Cell, count_bytes, json_option, print_json, print_line
from dcp_inspect.printing.table import print_table
from dcp_inspect.visuals.picture import draw, page
from dcp_manifest.index.columns import needed_bytes

_SHOWN_RANKS = 32


@click.command(
    "plan",
    epilog=examples(
        "dcp plan runs/step-100 --world 8",
        "dcp plan runs/step-100 --world 8 --svg layout.svg --html layout.html",
    ),
)
@click.argument("path", type=PLACE)
@click.option("--world", type=click.IntRange(1), required=True, help="Number of ranks.")
@click.option("--svg", type=LOCAL_FILE, help="Write a picture of who reads what.")
@click.option("--html", type=LOCAL_FILE, help="Write the picture as a page.")
@json_option
def command(path: str, world: int, svg: str | None, html: str | None, as_json: bool) -> int:
    """Show what WORLD ranks would read and write, every tensor sharded along its first dimension, as FSDP does."""
    index = open_index(path)
    ranks, segments = plan_reads(index, world, want_segments=bool(svg or html))
    plan_writes(index, ranks)
    title = f"{path} read by {world} rank{'s' if world != 1 else ''}"
    for target, wrap in ((svg, False), (html, True)):
        if target is not None:
            picture = draw(title, needed_bytes(index), segments, ranks)
            Path(target).write_text(page(title, picture) if wrap else picture, encoding="utf-8")
    if as_json:
        loads = [{**asdict(load), "files": sorted(load.files)} for load in ranks]
        print_json({"path": path, "world": world, "ranks": loads, "total_read_bytes": sum(r.read_bytes for r in ranks)})
        return 0
    _print(title, ranks)
    return 0


def _print(title: str, ranks: list[RankLoad]) -> None:
    columns = ("rank", "needs", "reads", "ratio", "ranges", "files", "writes")
    rows: list[Sequence[Cell]] = [(str(load.rank), *_cells(load)) for load in ranks[:_SHOWN_RANKS]]
    if len(ranks) > _SHOWN_RANKS:
        rows.append(("…", *[""] * (len(columns) - 1)))
    total = RankLoad(
        -1,
        sum(load.needed_bytes for load in ranks),
        sum(load.read_bytes for load in ranks),
        sum(load.reads for load in ranks),
        set().union(*(load.files for load in ranks)),
        sum(load.write_bytes for load in ranks),
    )
    rows.append([(cell, "bold") for cell in ("all", *_cells(total))])
    print_line(title)
    print_table(columns, rows, right=columns, drop=("ranges", "files"))


def _cells(load: RankLoad) -> tuple[str, ...]:
    ratio = f"{load.read_bytes / load.needed_bytes:.2f}" if load.needed_bytes else ""
    sizes = count_bytes(load.needed_bytes), count_bytes(load.read_bytes)
    return (*sizes, ratio, str(load.reads), str(len(load.files)), count_bytes(load.write_bytes))
