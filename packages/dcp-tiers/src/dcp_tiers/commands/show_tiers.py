"""`dcp tiers`: show which checkpoint is in which tier, and what each tier must still get."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence

import click

from dcp_io import StepFolder, policy_text
from dcp_manifest import printable_bytes
from dcp_tiers.commands.pictures import bar, line
from dcp_tiers.commands.survey import Survey, survey_tiers
from dcp_tiers.copying.send_file import JOURNAL
from dcp_tiers.listing import TieredStep
from dcp_tiers.tiers import Tiers

__all__ = ["command"]

_EXAMPLES = "\b\nExamples:\n  dcp tiers /nvme/run\n  dcp tiers run.tiers.toml --json\n  dcp tiers /nvme/run --clean"
_COLORS = {"complete": "green", "incomplete": "yellow", "waits": "yellow", "damaged": "red"}
# Lengths of the bars, from the longest that may have room in a line.
_CELLS, _COLUMNS_OF_FILES = (10, 4, 0), 120


@click.command("tiers", epilog=_EXAMPLES)
@click.argument("roots", nargs=-1, required=True, metavar="ROOT...")
@click.option(
    "--clean", is_flag=True, help="Remove what interrupted saves and promotions left that nobody will finish."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(roots: tuple[str, ...], clean: bool, as_json: bool) -> int:
    """Show which checkpoint is in which tier, complete or not, and how many bytes each tier must still get.

    A ROOT is the folder or URI of any tier of a run, or its run.tiers.toml. Indexes and sizes of files are read: `dcp
    verify -r` reads the data. A tier that cannot be read is named, and the others are shown.

    The exit code is 1 if a tier cannot be read or a copy is damaged.
    """
    runs = [Tiers.read(root, own=clean) for root in roots]  # what another user has described is not removed
    removed = [_clean(tiers) if clean else {} for tiers in runs]
    surveys = [survey_tiers(tiers) for tiers in runs]
    if as_json:
        found = zip(roots, surveys, removed, strict=True)
        values = [{"root": root, **survey.as_json(), "removed": gone} for root, survey, gone in found]
        click.echo(json.dumps(values, indent=2))
    else:
        for survey, gone in zip(surveys, removed, strict=True):
            for text in _lines(survey):
                click.echo(text)
            for url, steps in gone.items():
                click.echo(line(f"removed from {url}: steps {', '.join(map(str, steps))}"))
    return int(any(map(_is_bad, surveys)))


def _is_bad(survey: Survey) -> bool:
    damaged = any(copy is not None and copy.state == "damaged" for step in survey.steps for copy in step.copies)
    return damaged or any(survey.problems)


def _clean(tiers: Tiers) -> dict[str, list[int]]:
    """Remove leftovers in each tier; what a promoter will go on with stays.

    Without knowing what nearer tiers have, nothing is removed. Of what other hosts have, their journals tell.
    """
    survey = survey_tiers(tiers)
    removed: dict[str, list[int]] = {}
    for number, catalogue in enumerate(tiers.catalogues):
        if any(survey.problems[: number + 1]):
            break
        folders = catalogue.folders()
        running = {*survey.to_go_bytes[number]}
        if number and tiers.tiers[0].per_host:
            running |= _promoted_lately(folders, tiers.stale_after_seconds)
        steps = catalogue.sweep(folders, running=running)
        removed |= {tiers.tiers[number].url: steps} if steps else {}
    return removed


def _promoted_lately(folders: Sequence[StepFolder], stale_after_seconds: float) -> set[int]:
    """Return the steps of which a promoter has brought a file in the last `stale_after_seconds`."""
    since, journals = time.time() - stale_after_seconds, JOURNAL.removesuffix(".json")
    return {
        folder.step
        for folder in folders
        if any(entry.name.startswith(journals) and entry.mtime > since for entry in folder.entries)
    }


def _lines(survey: Survey) -> Iterator[str]:
    """Yield a line for each tier, and a picture: a row for each step, a column for each tier."""
    for number, tier in enumerate(survey.tiers.tiers):
        to_go = survey.to_go_bytes[number]
        size = printable_bytes(survey.bytes_in(number))
        problem = survey.problems[number]
        state = f"cannot be read: {problem}" if problem is not None else f"{size}, {policy_text(tier.keep)}"
        waits = f", {len(to_go)} to come, {printable_bytes(sum(to_go.values()))}" if to_go else ""
        yield line(f"tier {number}", f"{tier.url}: {state}{waits}")
    if not survey.steps:
        yield "there is no checkpoint in any tier"
        return
    yield ""
    yield from _table(survey)
    for step in survey.steps:
        for number, copy in enumerate(step.copies):
            if copy is not None and copy.state == "damaged":
                yield line(f"step {step.step} in tier {number} is damaged: {copy.problem}")


def _table(survey: Survey) -> list[str]:
    """Return the lines of the picture, with bars as long as the terminal has room for."""
    headings = ["step", *(f"tier {number}" for number in range(len(survey.tiers.tiers)))]
    columns = shutil.get_terminal_size((_COLUMNS_OF_FILES, 0)).columns
    for cells in _CELLS:
        rows = [_row(survey, step, cells) for step in survey.steps]
        texts = [headings, *([text for text, _ in row] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
        if sum(widths) + 2 * (len(widths) - 1) <= columns:
            break
    lines = [line(*headings, widths=tuple(widths))]
    for row in rows:
        padded = (click.style(line(text).ljust(widths[at]), fg=color) for at, (text, color) in enumerate(row))
        lines.append("  ".join(padded).rstrip())
    return lines


def _row(survey: Survey, step: TieredStep, cells: int) -> list[tuple[str, str | None]]:
    """Return text and colour of each cell of a step's row, with bars of so many cells."""
    row: list[tuple[str, str | None]] = [(str(step.step), None)]
    for number, copy in enumerate(step.copies):
        state = survey.state(step, number)
        to_go = survey.to_go_bytes[number].get(step.step)
        there = 0 if copy is None else copy.bytes
        if state == "complete":
            text = f"{bar(1, cells)} {printable_bytes(there)}"
            text += ", protected" if copy is not None and copy.protected else ""
        elif state in ("incomplete", "waits"):
            whole = 0 if to_go is None else there + to_go
            text = f"{bar(there / whole if whole else 0, cells)} "
            text += f"unfinished, {printable_bytes(there)}" if to_go is None else f"{printable_bytes(to_go)} to go"
        else:
            text = {"damaged": "damaged", "unknown": "?"}.get(state, "-")
        row.append((text.strip(), _COLORS.get(state)))
    return row
