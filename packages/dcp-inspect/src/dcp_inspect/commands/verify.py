"""`dcp verify`: check every byte of a checkpoint against its index."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import click

from dcp_inspect.contents import open_index
from dcp_inspect.errors import OtherFormatError
from dcp_inspect.exit_codes import DIFFERENT
from dcp_inspect.places import PLACE, is_uri
from dcp_inspect.printing.output import count_bytes, json_option, print_json, print_line, print_lines
from dcp_io import VerifyReport, open_store, verify_checkpoint
from dcp_manifest import CheckpointNotFoundError, DcpError, UnsupportedFormatError

__all__ = ["command"]


@click.command("verify")
@click.argument("path", type=PLACE)
@click.option("--threads", type=click.IntRange(1), help="Files read at the same time; the cores of this process.")
@json_option
def command(path: str, threads: int | None, as_json: bool) -> int:
    """Check all of a checkpoint: index, CRCs of every item, coverage of every tensor, missing files.

    The exit code is 1 if anything is damaged.
    """
    if not is_uri(path):
        _must_be_a_folder(path)
    report = verify_checkpoint(open_store(path), threads=threads or len(os.sched_getaffinity(0)))
    if not report.ok and not report.items:
        _raise_if_missing(path)
    if as_json:
        print_json(_as_json(path, report))
    else:
        _print(path, report)
    return 0 if report.ok else DIFFERENT


def _raise_if_missing(path: str) -> None:
    """Raise if there is no checkpoint, or files of another format; a damaged checkpoint raises nothing here."""
    try:
        open_index(path)
    except (CheckpointNotFoundError, OtherFormatError):
        raise
    except DcpError:
        return


def _must_be_a_folder(path: str) -> None:
    if not Path(path).exists():
        raise CheckpointNotFoundError(f"there is nothing at {path}: check the path")
    if not Path(path).is_dir():
        raise UnsupportedFormatError(
            f"{path} is a file, not a checkpoint's folder; files of other formats have no CRCs"
        )


def _as_json(path: str, report: VerifyReport) -> dict[str, object]:
    return {
        "path": path,
        "ok": report.ok,
        "items": report.items,
        "bytes": report.bytes,
        "unverified": sorted(report.unverified_keys),
        "problems": [asdict(one) for one in report.problems],
    }


def _print(path: str, report: VerifyReport) -> None:
    messages = (one.message if "(file " in one.message else str(one) for one in report.problems)
    print_lines((("damaged", "red"), "  ", message) for message in messages)
    if report.unverified_keys:
        some = ", ".join(sorted(report.unverified_keys)[:4])
        print_line(("no CRC", "yellow"), f"   {len(report.unverified_keys)} values, such as {some}")
    read = f"{report.items} items, {count_bytes(report.bytes)} read"
    if report.ok:
        print_line(("sound", "green"), f"    {path}: {read}")
    else:
        count = len(report.problems)
        print_line(f"{path}: {count} problem{'s' if count != 1 else ''}; {read}")
        print_line("load an earlier checkpoint (`dcp ls` shows them), or restore files from a copy")
