"""Arguments of the commands for keepers: names of runs, and seconds."""

from __future__ import annotations

from typing import Any, TypeVar

import click

from dcp_memory.places import check_run

__all__ = ["Seconds", "checked_runs"]

_Runs = TypeVar("_Runs", str, tuple[str, ...])


class Seconds(click.FloatRange):
    """Number of seconds of at least 0."""

    name = "seconds"

    def __init__(self) -> None:
        super().__init__(min=0)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number; NaN, which is in no range, is refused, too."""
        seconds = float(super().convert(value, param, ctx))
        if seconds != seconds:  # noqa: PLR0124 - NaN
            self.fail(f"{value!r} is not a number of seconds", param, ctx)
        return seconds


def checked_runs(context: click.Context, parameter: click.Parameter, runs: _Runs) -> _Runs:
    """Return the name of a run, or names, unchanged, if they can be used."""
    for run in (runs,) if isinstance(runs, str) else runs:
        try:
            check_run(run)
        except ValueError as error:
            raise click.BadParameter(str(error), context, parameter) from None
    return runs
