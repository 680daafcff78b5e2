"""`dcp latest`: print the path of the newest loadable checkpoint."""

from __future__ import annotations

import os

import click

from dcp_inspect.arguments import PLACE, is_uri
from dcp_inspect.examples import examples
from dcp_inspect.listing import find, first_damage, look_at
from dcp_inspect.printing.output import json_option, print_json, say
from dcp_io import StorageError
from dcp_manifest import CheckpointNotFoundError


@click.command(
    "latest",
    epilog=examples(
        "dcp latest runs",
        "dcp latest runs --deep                # read its bytes, too",
        "dcp latest s3://bucket/runs --json",
    ),
)
@click.argument("path", type=PLACE, default=".")
@click.option(
    "--deep", is_flag=True, help="Read the bytes: print the newest sound checkpoint, not the newest complete."
)
@json_option
def command(path: str, deep: bool, as_json: bool) -> int:
    """Print the path of the newest complete checkpoint in PATH or below, and nothing else, on stdout.

    Complete: the index can be read, and the files are there in full length. With --deep, sound: every byte was read and
    matches. Newer checkpoints that are passed over are named on stderr. The exit code is 3 if there is none, and 4 if
    there is none and something cannot be read.
    """
    reasons: dict[str, str] = {}
    unread = 0
    for one in find(path):
        listed = look_at(one)
        problem, unreadable = listed.problem, listed.unreadable
        if deep and problem is None:
            problem, unreadable = first_damage(listed.path)
        if problem is None:
            place = listed.path if is_uri(listed.path) else os.path.normpath(listed.path)
            if as_json:
                print_json({**listed.as_json(), "path": place, "sound": deep or None, "passed_over": reasons})
            else:
                say(place)
            return 0
        unread += unreadable
        reasons[listed.path] = problem
        say(f"passed over {listed.path}: {problem}", err=True)
    if not reasons:
        raise CheckpointNotFoundError(f"there is no checkpoint in {path} or below: check the path")
    none = f"no checkpoint in {path} or below is {'sound' if deep else 'complete'}"
    if unread:
        raise StorageError(f"{none}, and {unread} of {len(reasons)} cannot be read")
    raise CheckpointNotFoundError(f"{none}: {len(reasons)} passed over")
