"""`dcp promote`: copy to each tier what it must still get, and show the progress."""

from __future__ import annotations

import json
import math
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import click

from dcp_hooks import CheckpointEvent, hookimpl, installed
from dcp_manifest import printable_bytes
from dcp_tiers.commands.pictures import bar, line
from dcp_tiers.promote import only_one, promote
from dcp_tiers.tiers import Tiers

__all__ = ["command"]

_EXAMPLES = (
    "\b\nExamples:\n  dcp promote /nvme/run\n  dcp promote run.tiers.toml --seconds 600\n  dcp promote /nvme/run --json"
)
_ERASE = "\r\x1b[2K"


@click.command("promote", epilog=_EXAMPLES)
@click.argument("roots", nargs=-1, required=True, metavar="ROOT...")
@click.option("--seconds", type=click.FloatRange(0), help="Give up after so long without progress; default: never.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(roots: tuple[str, ...], seconds: float | None, as_json: bool) -> int:
    """Copy to each tier of a run what its policy keeps and it does not have: by ascending step, verified, index last.

    A ROOT is the folder or URI of any tier, or its run.tiers.toml. It can be interrupted, and goes on where it was. A
    storage that fails is tried again.

    The exit code is 1 if something has not arrived.
    """
    if seconds is not None and math.isnan(seconds):
        raise click.BadParameter("nan is not a number of at least 0.", param_hint="'--seconds'")
    results = []
    for root, tiers in [(root, Tiers.read(root, own=True)) for root in roots]:
        watch = _Watch(quiet=as_json)
        with only_one(tiers) as alone, watch.observing():
            left = promote(tiers, seconds=seconds) if alone else {}
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
    """Observer of promotions: prints a line for each that ends and, on a terminal, the progress of the current one.

    Args:
        quiet: Whether to print nothing.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._draws = sys.stderr.isatty() and not quiet
        self._lock = threading.Lock()
        self.arrived: list[str] = []
        """Paths or URIs of the copies that were made."""
        self.skipped: list[str] = []
        """Those that the policy of the tier does not want any more."""

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Observe the promotions of this process."""
        installed.register(self, "dcp-promote")
        try:
            yield
        finally:
            installed.unregister("dcp-promote")

    @hookimpl
    def dcp_on_event(self, event: CheckpointEvent) -> None:
        """Print an event of a promotion."""
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
        """Remove the line of the current promotion."""
        if self._draws:
            click.echo(_ERASE, err=True, nl=False)

    def _say(self, state: str, text: str) -> None:
        self.clear()
        if not self._quiet:
            click.echo(line(state.ljust(7), text))
