"""`dcp tiers`: show which checkpoint is in which tier, and what each tier must still get."""

from __future__ import annotations

import json
from collections.abc import Iterator

import click

from dcp_io import policy_text
from dcp_manifest import printable_bytes
from dcp_tiers.commands.pictures import bar, line
from dcp_tiers.commands.survey import Survey, survey_tiers
from dcp_tiers.listing import TieredStep
from dcp_tiers.tiers import Tiers

__all__ = ["command"]

_EXAMPLES = "\b\nExamples:\n  dcp tiers /nvme/run\n  dcp tiers run.tiers.toml --json\n  dcp tiers /nvme/run --clean"
_COLORS = {"complete": "green", "incomplete": "yellow", "waits": "yellow", "damaged": "red"}
_LEAST_COLUMN = 12


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
    runs = [Tiers.read(root) for root in roots]
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
    """Remove the leftovers in each tier that can be read; what a promoter will go on with stays."""
    survey = survey_tiers(tiers)
    removed: dict[str, list[int]] = {}
    for number, catalogue in enumerate(tiers.catalogues):
        if survey.problems[number] is None:
            steps = catalogue.sweep(running=survey.to_go_bytes[number])
            removed |= {tiers.tiers[number].url: steps} if steps else {}
    return removed


def _lines(survey: Survey) -> Iterator[str]:
    """Yield a line for each tier, and a picture: a row for each step, a column for each tier."""
    for number, tier in enumerate(survey.tiers.tiers):
        to_go = survey.to_go_bytes[number]
        size = printable_bytes(survey.bytes_in(number))
        problem = survey.problems[number]
        state = f"cannot be read: {problem}" if problem is not None else f"{size}, {policy_text(tier.keep)}"
        waits = f", {len(to_go)} to come, {printable_bytes(sum(to_go.values()))}" if to_go else ""
        yield line(f"tier {number}", f"{tier.url}: {state}{waits}")
    rows = [_row(survey, step) for step in survey.steps]
    if not rows:
        yield "there is no checkpoint in any tier"
        return
    headings = ["step", *(f"tier {number}" for number in range(len(survey.tiers.tiers)))]
    texts = [headings, *([text for text, _ in row] for row in rows)]
    widths = tuple(max(_LEAST_COLUMN, *map(len, column)) if at else max(map(len, column))
                   for at, column in enumerate(zip(*texts, strict=True)))  # fmt: skip
    yield ""
    yield line(*headings, widths=widths)
    for row in rows:
        padded = (click.style(line(text).ljust(widths[at]), fg=color) for at, (text, color) in enumerate(row))
        yield "  ".join(padded).rstrip()


def _row(survey: Survey, step: TieredStep) -> list[tuple[str, str | None]]:
    """Return text and colour of each cell of a step's row."""
    cells: list[tuple[str, str | None]] = [(str(step.step), None)]
    for number, copy in enumerate(step.copies):
        state = survey.state(step, number)
        waits = step.step in survey.to_go_bytes[number]
        to_go = survey.to_go_bytes[number].get(step.step, 0)
        there = 0 if copy is None else copy.bytes
        if state == "complete":
            text = f"{bar(1)} {printable_bytes(there)}"
            text += ", protected" if copy is not None and copy.protected else ""
        elif state in ("incomplete", "waits"):
            whole = there + to_go
            text = f"{bar(there / whole if waits and whole else 0)} "
            text += f"{printable_bytes(to_go)} to go" if waits else f"unfinished, {printable_bytes(there)}"
        elif state == "damaged":
            text = f"damaged: {'' if copy is None else copy.problem}"
        else:
            text = "?" if state == "unknown" else "-"
        cells.append((text, _COLORS.get(state)))
    return cells
