"""`dcp unquarantine`: let readers use a checked checkpoint again."""

from __future__ import annotations

import os

import click

from dcp_inspect.arguments import PLACE, open_folder
from dcp_inspect.errors import DIFFERENT
from dcp_inspect.examples import examples
from dcp_inspect.listing import notes_on
from dcp_inspect.printing.output import json_option, print_json, say
from dcp_io import verify_checkpoint
from dcp_manifest import CheckpointNotFoundError, FoundCheckpoint
from dcp_manifest.folders.folder import QUARANTINE


@click.command(
    "unquarantine",
    epilog=examples(
        "dcp unquarantine runs/step-200",
        "dcp unquarantine runs/step-200 --force   # without reading it",
    ),
)
@click.argument("path", type=PLACE)
@click.option("--force", is_flag=True, help="Without reading the checkpoint first.")
@json_option
def command(path: str, force: bool, as_json: bool) -> int:
    """Lift the quarantine of the checkpoint in PATH, so that the manager and `dcp latest` use it again.

    The manager quarantines a checkpoint that it could not load. After you have restored its files from a copy, this
    command reads all of it, and lifts the quarantine if it is sound. If not, the exit code is 1.
    """
    store = open_folder(path)
    if not store.exists(QUARANTINE):
        raise CheckpointNotFoundError(f"{path} is not quarantined: it has no {QUARANTINE}")
    reason = notes_on(FoundCheckpoint(store, 0.0, notes=frozenset({QUARANTINE}))).quarantine
    problems = () if force else verify_checkpoint(store, threads=len(os.sched_getaffinity(0))).problems
    if not problems:
        store.delete(QUARANTINE)
        store.sync_folder()
    if as_json:
        print_json({"path": path, "lifted": not problems, "reason": reason, "problems": [str(one) for one in problems]})
    elif problems:
        say(f"{path} stays quarantined: {len(problems)} problem{'s' * (len(problems) != 1)}, the first: {problems[0]}")
        say(f"restore its files from a copy (`dcp verify {path}` names them), or add --force")
    else:
        say(f"{path} is no longer quarantined; the reason was: {reason}")
    return DIFFERENT if problems else 0
