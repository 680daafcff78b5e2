"""The commands `dcp tiers`, which shows which checkpoint is in which tier, and `dcp promote`."""

from __future__ import annotations

import json
import math
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import click

from dcp_base import CheckpointEvent, DcpError, hookimpl, installed
from dcp_base.escaping import printable, printable_bytes
from dcp_io.roots.catalogue import Catalogue, StepFolder
from dcp_io.timed_call import TimedCall
from dcp_tiers.copying import JOURNAL
from dcp_tiers.listing import TieredStep, list_steps
from dcp_tiers.promote import only_one, promote, tiers_to_promote
from dcp_tiers.removal import retain_in_first
from dcp_tiers.tiers import Tiers
from dcp_tiers.waiting import steps_to_send

_TRUST_HELP = "Obey a run.tiers.toml that another user owns, or that is in a bucket: you have read it."


_TIERS_EXAMPLES = (
    "\b\nExamples:\n  dcp tiers /nvme/run\n  dcp tiers run.tiers.toml --json\n  dcp tiers /nvme/run --clean"
)
_COLORS = {"complete": "green", "incomplete": "yellow", "waits": "yellow", "damaged": "red"}
# Lengths of the bars, the longest first.
_CELLS, _COLUMNS_OF_FILES = (10, 4, 0), 120


@click.command("tiers", epilog=_TIERS_EXAMPLES)
@click.argument("roots", nargs=-1, required=True, metavar="ROOT...")
@click.option(
    "--clean", is_flag=True, help="Remove what interrupted saves and promotions left that nobody will finish."
)
@click.option("--trust-description", is_flag=True, help=_TRUST_HELP)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show_tiers(roots: tuple[str, ...], clean: bool, trust_description: bool, as_json: bool) -> int:
    """Show which checkpoint is in which tier, complete or not, and how many bytes each tier must still get.

    A ROOT is the directory or URI of any tier of a run, or its run.tiers.toml. Indexes and sizes of files are read:
    `dcp verify -r` reads the data. A tier that cannot be read is named, and the others are shown.

    The exit code is 1 if a tier cannot be read or a copy is damaged.
    """
    # Tiers that another user has described are shown, but nothing is removed.
    runs = [Tiers.read(root, own=clean, trust=trust_description) for root in roots]
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
    """Remove leftovers that no promoter will reuse, but nothing if nearer tiers are unreadable."""
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
    since, journals = time.time() - stale_after_seconds, JOURNAL.removesuffix(".json")
    return {
        folder.step
        for folder in folders
        if any(entry.name.startswith(journals) and entry.mtime > since for entry in folder.entries)
    }


def _lines(survey: Survey) -> Iterator[str]:
    for number, tier in enumerate(survey.tiers.tiers):
        to_go = survey.to_go_bytes[number]
        size = printable_bytes(survey.bytes_in(number))
        problem = survey.problems[number]
        state = f"cannot be read: {problem}" if problem is not None else f"{size}, {tier.keep.text()}"
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


_PROMOTE_EXAMPLES = (
    "\b\nExamples:\n  dcp promote /nvme/run\n  dcp promote run.tiers.toml --progress-timeout-seconds 600\n"
    "  dcp promote /nvme/run --json"
)
_ERASE = "\r\x1b[2K"


@click.command("promote", epilog=_PROMOTE_EXAMPLES)
@click.argument("roots", nargs=-1, required=True, metavar="ROOT...")
@click.option(
    "--progress-timeout-seconds",
    type=click.FloatRange(0),
    help="Give up after so long without progress; default: never.",
)
@click.option("--trust-description", is_flag=True, help=_TRUST_HELP)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def promote_tiers(
    roots: tuple[str, ...], progress_timeout_seconds: float | None, trust_description: bool, as_json: bool
) -> int:
    """Copy to each tier of a run what its policy keeps and it does not have: by ascending step, verified, index last.

    A ROOT is the directory or URI of any tier, or its run.tiers.toml. It can be interrupted, and goes on where it was.
    A storage that fails is tried again.

    Checkpoints are written and removed where run.tiers.toml says. One that another user owns, or that is in a bucket,
    must be confirmed with --trust-description.

    The exit code is 1 if something has not arrived.
    """
    if progress_timeout_seconds is not None and math.isnan(progress_timeout_seconds):
        raise click.BadParameter("nan is not a number of at least 0.", param_hint="'--progress-timeout-seconds'")
    results = []
    for root, tiers in [(root, tiers_to_promote(root, trust=trust_description)) for root in roots]:
        watch = _Watch(quiet=as_json)
        with only_one(tiers) as alone, watch.observing():
            left = promote(tiers, progress_timeout_seconds=progress_timeout_seconds) if alone else {}
            if alone:
                retain_in_first(tiers)
        watch.clear()
        result = {"root": root, "busy": not alone, "arrived": watch.arrived, "skipped": watch.skipped, "left": left}
        results.append(result)
        if not alone:
            click.echo(line(f"{root}: another promoter of this run is at work on this host"), err=True)
        for url, steps in left.items():
            click.echo(line(f"not in {url}: steps {', '.join(map(str, steps))}"), err=True)
        if alone and not (as_json or left or watch.arrived):
            click.echo(line(f"{root}: everything has arrived already"))
    if as_json:
        click.echo(json.dumps(results, indent=2))
    return int(any(result["busy"] or result["left"] for result in results))


class _Watch:
    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._draws = sys.stderr.isatty() and not quiet
        self._lock = threading.Lock()
        self.arrived: list[str] = []
        self.skipped: list[str] = []

    @contextmanager
    def observing(self) -> Iterator[None]:
        installed.register(self, "dcp-promote")
        try:
            yield
        finally:
            installed.unregister("dcp-promote")

    @hookimpl
    def dcp_on_event(self, event: CheckpointEvent) -> None:
        if event.operation != "promote" or event.checkpoint_id is None:
            return
        place, size = event.checkpoint_id, printable_bytes(event.bytes or 0)
        with self._lock:
            if event.phase == "skip":
                self.skipped.append(place)
                self._say("skipped", f"{place}: its tier does not want it any more")
            elif event.phase == "total" and event.state == "finished":
                self.arrived.append(place)
                self._say("arrived", f"{place}  {size} in {event.seconds or 0:.1f} s")
            elif event.state == "failed":
                self._say("failed", f"{place}: {event.error}")
            elif event.state == "progress" and self._draws:
                part = (event.bytes or 0) / max(event.expected_bytes or 0, 1)
                text = line(bar(part), f"{part:4.0%}", size, place)
                width = shutil.get_terminal_size().columns - 1
                click.echo(_ERASE + text[:width], err=True, nl=False)

    def clear(self) -> None:
        if self._draws:
            click.echo(_ERASE, err=True, nl=False)

    def _say(self, state: str, text: str) -> None:
        self.clear()
        if not self._quiet:
            click.echo(line(state.ljust(7), text))


@dataclass(frozen=True, slots=True)
class Survey:
    """State of a run's tiers."""

    tiers: Tiers
    problems: tuple[str | None, ...]
    steps: tuple[TieredStep, ...]
    """Ascending, in readable tiers."""
    to_go_bytes: tuple[dict[int, int], ...]
    """Per tier: step → bytes that it must still get."""

    def bytes_in(self, number: int) -> int:
        """Return the size of a tier's files."""
        return sum(copy.bytes for step in self.steps if (copy := step.copies[number]) is not None)

    def as_json(self) -> dict[str, Any]:
        """Return values for JSON."""
        tiers = [
            {
                "root": tier.url,
                "keep": tier.keep.text(),
                "problem": self.problems[number],
                "bytes": self.bytes_in(number),
                "bytes_to_go": sum(self.to_go_bytes[number].values()),
                "steps_to_go": sorted(self.to_go_bytes[number]),
            }
            for number, tier in enumerate(self.tiers.tiers)
        ]
        return {"tiers": tiers, "steps": [self._step(step) for step in self.steps]}

    def _step(self, step: TieredStep) -> dict[str, Any]:
        copies: list[dict[str, Any]] = []
        for number, copy in enumerate(step.copies):
            state = self.state(step, number)
            to_go = self.to_go_bytes[number].get(step.step, 0)
            found: dict[str, Any] = {}
            if copy is not None:
                found = {"bytes": copy.bytes, "save_id": copy.save_id, "problem": copy.problem}
                found["protected"] = copy.protected
            copies.append({"state": state, "bytes_to_go": to_go, **found})
        return {"step": step.step, "copies": copies}

    def state(self, step: TieredStep, number: int) -> str:
        """Return the copy's state; without one `waits` (needed), `unknown` (tier unreadable) or `absent`."""
        copy = step.copies[number]
        if copy is not None:
            return copy.state
        if self.problems[number] is not None:
            return "unknown"
        return "waits" if step.step in self.to_go_bytes[number] else "absent"


def survey_tiers(tiers: Tiers) -> Survey:
    """Read the indexes in all readable tiers."""
    problems = tuple(map(_problem, tiers.catalogues))
    known = [
        catalogue if problem is None else None for catalogue, problem in zip(tiers.catalogues, problems, strict=True)
    ]
    steps = tuple(list_steps(known))
    to_go: list[dict[int, int]] = [{} for _ in problems]
    for number in range(1, len(problems)):
        holders = [nearer for nearer in range(number) if problems[nearer] is None]
        waiting = set[int]().union(*(steps_to_send(tiers, number, nearer) for nearer in holders))
        for step in steps:
            count = _bytes_to_go(step, number) if step.step in waiting else None
            if count is not None:
                to_go[number][step.step] = count
    return Survey(tiers, problems, steps, tuple(to_go))


def _problem(catalogue: Catalogue) -> str | None:
    try:
        TimedCall(catalogue.store.url, catalogue.folders).result()
    except (OSError, DcpError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _bytes_to_go(step: TieredStep, number: int) -> int | None:
    source = next((step.copies[holder] for holder in step.complete_in if holder < number), None)
    there = step.copies[number]
    if source is None or (there is not None and there.state == "complete" and there.save_id == source.save_id):
        return None
    return source.bytes - (there.bytes if there is not None and there.state == "incomplete" else 0)


def bar(part: float, cells: int = 10) -> str:
    """Return a bar of cells, filled in part (0 to 1)."""
    full, empty = ("\u2588", "\u00b7") if _can_print("\u2588\u00b7") else ("#", ".")
    filled = min(cells, int(part * cells))
    return full * filled + empty * (cells - filled)


def line(*cells: str, widths: tuple[int, ...] = ()) -> str:
    """Return padded cells, with control characters escaped."""
    padded = [cell.ljust(widths[at]) if at < len(widths) else cell for at, cell in enumerate(map(printable, cells))]
    return "  ".join(padded).rstrip()


def _can_print(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
