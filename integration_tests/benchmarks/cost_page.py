"""Makes the tables of `docs/cost.md` of what was measured: `python -m integration_tests.benchmarks.cost_page`.

The figures come from `docs/benchmarks.json` and from the tables of the pages about asynchronous saving and compression.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from integration_tests.benchmarks.environments import ROOT
from integration_tests.benchmarks.figures import faster
from integration_tests.benchmarks.pages import replace_figures
from integration_tests.benchmarks.results import Results, RowResult
from integration_tests.benchmarks.tables import STOCK, against_stock

__all__ = ["MODULE", "lines", "main"]

MODULE = "integration_tests.benchmarks.cost_page"
DOCS = ROOT / "docs"
PAGE = DOCS / "cost.md"
OURS = "ours"


def lines() -> Iterator[str]:
    """The tables, as Markdown."""
    results = Results.read(DOCS / "benchmarks.json")
    yield from _calls(results)
    yield ""
    yield from _training()
    yield ""
    yield from _features(results)


def _row(results: Results, case: str, place: str, *, fsync: bool) -> RowResult:
    row = results.row(case, place, fsync=fsync)
    if row is None:
        raise ValueError(f"{case} was not measured: {place}, fsync={fsync}")
    return row


def _seconds(row: RowResult, operation: str) -> float:
    found = row.entries[OURS].spread(operation)
    if found is None:
        raise ValueError(f"{row.case}: no figure of {operation}")
    return found.median


def _against_stock(row: RowResult, operation: str) -> float:
    """Our seconds ÷ those of the best setting of PyTorch's."""
    ratio = against_stock(row, operation)
    if ratio is None:
        raise ValueError(f"{row.case}: no figure of stock's {operation}")
    return ratio


def _peak_mib(row: RowResult, name: str, operation: str) -> float:
    found = row.entries[name].spread(operation, "peak_bytes")
    return found.median / 2**20 if found is not None else 0.0


def _calls(results: Results) -> Iterator[str]:
    gib = _row(results, "gib", "disk", fsync=True)
    scalars = _row(results, "scalars", "disk", fsync=True)
    yield "| call | takes | than PyTorch 2.13 | memory above the state: dcp, PyTorch |"
    yield "| --- | ---: | ---: | ---: |"
    for row, what in ((gib, "1 GiB, 64 tensors"), (scalars, "20,000 scalars")):
        for operation in ("save", "load"):
            theirs = max(_peak_mib(row, name, operation) for name in STOCK if name in row.entries)
            memory = f"{_peak_mib(row, OURS, operation):.0f} MiB, {theirs:.0f} MiB"
            how = "with fsync" if operation == "save" else "every byte checked"
            ratio = faster(_against_stock(row, operation))
            yield f"| `{operation}`, {what}, {how} | {_seconds(row, operation):.2f} s | {ratio} | {memory} |"


def _training() -> Iterator[str]:
    """Of the tables of the page about asynchronous saving."""
    page = (DOCS / "async.md").read_text()

    def cells(name: str) -> list[str]:
        found = re.search(rf"^\| {name} \| (.*) \|$", page, re.MULTILINE)
        if found is None:
            raise ValueError(f"async.md has no line {name!r}")
        return [cell.strip() for cell in found[1].split("|")]

    lost = float(cells("lost training time ÷ stock's \\(process\\)")[0])
    ours, theirs = cells("ours process"), cells("stock process")
    yield "| a save while training runs | dcp | PyTorch 2.13 |"
    yield "| --- | ---: | ---: |"
    yield f"| training time lost | {ours[0]} s, {faster(lost).replace('faster', 'less')} | {theirs[0]} s |"
    yield f"| worst step | {_milliseconds(ours[2])} | {_milliseconds(theirs[2])} |"
    yield f"| until `save` returns | {_milliseconds(ours[4])} | {_milliseconds(theirs[4])} |"


def _milliseconds(seconds: str) -> str:
    return f"{1000 * float(seconds):.0f} ms"


def _features(results: Results) -> Iterator[str]:
    gib = _row(results, "gib", "disk", fsync=True)
    without = _row(results, "gib", "disk", fsync=False)
    check = _seconds(gib, "load") - _seconds(gib, "load, unverified")
    disk = gib.entries[OURS].sizes["bytes"] / gib.bytes - 1
    page = (DOCS / "compression.md").read_text()
    auto = re.search(r"^\| MiniLM, bf16 \| auto \| ([\d.]+) \|", page, re.MULTILINE)
    took = re.search(r"`auto` takes ([\d.]+) × as long\s+as no compression", page)
    if auto is None or took is None:
        raise ValueError("compression.md lacks the figures of `auto`")
    yield "| feature | costs | gives | turn it off, or on |"
    yield "| --- | --- | --- | --- |"
    yield (
        f"| checksums, on | {check:.2f} s of a load of 1 GiB that takes {_seconds(gib, 'load'):.2f} s "
        "| a damaged byte is refused, with file and name "
        "| `FileSystemReader(id, verify=False)` |"
    )
    yield (
        f"| fsync, on | {_seconds(gib, 'save') - _seconds(without, 'save'):.2f} s of a save of 1 GiB "
        f"that takes {_seconds(gib, 'save'):.2f} s | a save that returned survives a power cut "
        "| `FileSystemWriter(id, sync_files=False)` |"
    )
    yield (
        f"| compression, off | a save to a fast disk takes {float(took[1]):.1f} × as long "
        f"| bf16 weights of MiniLM take {100 * float(auto[1]):.0f} % of their size "
        '| `FileSystemWriter(id, compression="auto")` |'
    )
    yield (
        f"| readable by PyTorch, on | {100 * disk:.3f} % of disk space for 1 GiB in 64 tensors "
        "| `torch.distributed.checkpoint` loads what we save "
        '| `FileSystemWriter(id, layout="raw", interop=False)` |'
    )


def main() -> int:
    """Write the tables into the page."""
    replace_figures(PAGE, MODULE, list(lines()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
