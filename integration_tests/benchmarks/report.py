"""Makes `docs/benchmarks.md` and its pictures of results: `python -m integration_tests.benchmarks.report FILE`.

What stands between the two marks of the page is written by hand, and kept when the page is made anew.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from integration_tests.benchmarks import tables
from integration_tests.benchmarks.bars import judge
from integration_tests.benchmarks.charts import draw
from integration_tests.benchmarks.contenders import CONTENDERS
from integration_tests.benchmarks.environments import ROOT
from integration_tests.benchmarks.results import Results

__all__ = ["main", "notes_by_hand", "page"]

ROUNDS = 9  # that count; with fewer the medians are not to be relied on
PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- notes: by hand, kept -->", "<!-- end of notes -->"

INTRODUCTION = """\
How fast this library saves and loads, and how much memory it takes, compared with PyTorch's own checkpointing, four
other libraries and the *raw floor*: the same bytes by plain system calls, without a checkpoint's index, checksums and
atomic publishing. One machine without a GPU: nothing was measured on CUDA, over NCCL or on a cluster. In short: [What
does it cost?](cost.md)
"""
METHOD = """\
Measured by

```sh
nox -s bench -- --json results.json
# makes this page:
.nox/shared/bin/python -m integration_tests.benchmarks.report results.json
```

`nox -s bench -- --list` names cases and contenders; `--case`, `--contender`, `--place`, `--rounds`, `--scale` choose.
The environments of the other libraries are made in `.nox/rivals` when they are first needed.

- Each contender is a separate process in a separate environment, and lives as long as the case; ranks are
  processes on one machine, over gloo, with `OMP_NUM_THREADS=1`.
- All hold the same seeded values; floats look like weights, N(0, 0.02). State dicts are flat.
- A round runs the contenders in random order; each saves into a new directory and loads its own files. The first round
  warms up and does not count. A ratio compares two times of the same round. Tables show the median, the smallest and
  the largest value of all rounds. `ours ÷ this` below 1 means that we are faster.
- Before each save and each load, `sync` flushes all written data to the disk, so no run pays for another's bytes.
- All contenders of a table call fsync, or none does. If a contender has no fsync, we add one and count its time.
  Contenders that always call fsync are marked.
- Loads restore values into existing tensors, from a warm page cache. The first round compares every byte; later rounds
  compare both ends of a tensor. *cold*: the files were removed from the page cache before the load; *from disk ÷ state*
  shows that they were.
- *peak*: the increase of resident memory, mapped files included, on the rank with the largest increase.
  *read ÷ state*: bytes that `read` calls returned, on all ranks together; mapped files do not count there.
- Times of several ranks are the times of the slowest rank.
"""


def page(results: Results, notes: str, images: Mapping[str, str]) -> str:
    """The whole page as Markdown."""
    return "\n".join([*_head(results, notes, images), *_cases(results, images), ""])


def _head(results: Results, notes: str, images: Mapping[str, str]) -> Iterator[str]:
    yield "# Benchmarks\n"
    yield INTRODUCTION
    if any(row.scale != 1 or row.rounds < ROUNDS for row in results.rows):
        yield f"**A trial run: sizes scaled down, or fewer than {ROUNDS} rounds. It says little about speed.**\n"
    first = results.rows[0]
    if first.case in images:
        yield f"![{first.title}]({images[first.case]})\n"
    yield "## Summary\n"
    yield "Compared with the best setting of `torch.distributed.checkpoint` (*stock*); our loads verify every byte.\n"
    yield from _table(tables.SUMMARY_HEADINGS, tables.summary_lines(results))
    yield "\n## Targets\n"
    yield "Medians of paired ratios; of stock, its best setting.\n"
    yield from _table(tables.BAR_HEADINGS, tables.bar_lines(judge(results)))
    yield f"\n{BEGIN}\n{notes.strip()}\n{END}\n"
    yield "## How it is measured\n"
    yield METHOD
    yield "## Machine\n"
    yield from _table(("", ""), results.machine.items())
    failed = list(tables.failures(results))
    yield "\n## Contenders\n"
    yield from _table(("", "version", "remarks"), _contenders(results))
    yield "\n### What failed\n"
    if failed:
        yield from _table(("where", "who", "what it said"), failed)
    else:
        yield "Nothing."


def _contenders(results: Results) -> Iterator[tuple[str, str, str]]:
    syncs = {"itself": "", "explicit": "flushed by the harness", "always": "flushes always"}
    for each in CONTENDERS:
        remarks = "; ".join(filter(None, (each.note, syncs[each.fsync])))
        yield each.name, results.versions.get(each.worker, ""), remarks


def _cases(results: Results, images: Mapping[str, str]) -> Iterator[str]:
    for case in dict.fromkeys(row.case for row in results.rows):
        rows = [row for row in results.rows if row.case == case]
        yield f"\n## {rows[0].title[0].upper()}{rows[0].title[1:]}\n"
        first = rows[0]
        yield f"{first.tensors:,} tensors, {first.bytes:,} bytes. {first.notes}".strip() + "\n"
        if case in images and first is not results.rows[0]:  # the first one is at the top
            yield f"![{first.title}]({images[case]})"
        for row in rows:
            for kind in tables.KINDS:
                found = list(tables.lines(row, kind))
                if found:
                    where = f"{row.place}, {'fsync' if row.fsync else 'no fsync'}"
                    yield f"\n### {case}: {kind}, {where}\n\nRounds: {row.rounds}, {row.measured}.\n"
                    yield from _table(tables.headings(kind), found)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(headings) + " |"
    yield "| --- " + "| ---: " * (len(headings) - 1) + "|" if len(headings) > 3 else "| --- " * len(headings) + "|"
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"


def notes_by_hand(path: Path) -> str:
    """The part written by hand."""
    text = path.read_text() if path.exists() else ""
    return text.partition(BEGIN)[2].partition(END)[0]


def main(given: Sequence[str]) -> int:
    """Write page and pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(given)
    results = Results.read(options.results)
    images = draw(results, options.page.parent / "images")
    links = {case: path.relative_to(options.page.parent).as_posix() for case, path in images.items()}
    options.page.write_text(page(results, notes_by_hand(options.page), links))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
