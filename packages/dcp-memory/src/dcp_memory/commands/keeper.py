"""`dcp keeper`: start, stop and show the keepers of this user on this host."""

from __future__ import annotations

import click

from dcp_memory.commands.start import start
from dcp_memory.commands.status import status
from dcp_memory.commands.stop import stop

__all__ = ["command"]

_EXAMPLES = (
    "\b\nExamples:\n  dcp keeper start my-run --max-bytes 64G\n  dcp keeper status\n  dcp ls keeper://my-run\n"
    "  dcp keeper stop my-run"
)


@click.group("keeper", epilog=_EXAMPLES)
def command() -> None:
    """Start, stop and show keepers: processes that hold the checkpoints of a run in the memory of this host.

    A keeper serves its own user alone. Saving to keeper://RUN starts one, too.
    """


for _each in (start, stop, status):
    command.add_command(_each)
