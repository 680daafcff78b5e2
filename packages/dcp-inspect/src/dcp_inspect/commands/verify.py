"""`dcp verify`: check every byte of a checkpoint, or of all checkpoints below a folder, against their indexes."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import click

from dcp_inspect.contents import open_index
from dcp_inspect.errors import OtherFormatError
from dcp_inspect.examples import examples
from dcp_inspect.exit_codes import DIFFERENT
from dcp_inspect.listing import find
from dcp_inspect.places import PLACE, is_uri
from dcp_inspect.printing.output import count_bytes, json_option, print_json, print_line, print_lines
from dcp_io import Problem, VerifyReport, open_store, verify_checkpoint
from dcp_manifest import CheckpointNotFoundError, DcpError, UnsupportedFormatError

__all__ = ["command"]

_SHOWN_KEYS = 4


@click.command(
    "verify",
    epilog=examples(
        "dcp verify runs/step-100",
        "dcp verify -r runs                    # all checkpoints below a folder",
        "dcp verify s3://bucket/runs/step-100",
        "dcp verify runs/step-100 --json",
    ),
)
@click.argument("path", type=PLACE)
@click.option("-r", "--recursive", is_flag=True, help="Check every checkpoint in PATH and the folders below it.")
@click.option("--threads", type=click.IntRange(1), help="Files read at the same time; the cores of this process.")
@json_option
def command(path: str, recursive: bool, threads: int | None, as_json: bool) -> int:
    """Check all of a checkpoint: index, CRCs of every item, coverage of every tensor, missing files.

    Each byte is read once. The exit code is 1 if anything is damaged.
    """
    if recursive:
        return _verify_below(path, threads, as_json=as_json)
    if not is_uri(path):
        _must_be_a_folder(path)
    report = _verify(path, threads)
    if not report.ok and not report.items:
        _raise_if_missing(path)
    if as_json:
        print_json(_as_json(path, report))
    else:
        _print(path, report)
        if not report.ok:
            print_line(
                f"load an earlier checkpoint (`dcp ls {_parent(path)}` shows them), or restore files from a copy"
            )
    return 0 if report.ok else DIFFERENT


def _verify(path: str, threads: int | None) -> VerifyReport:
    return verify_checkpoint(open_store(path), threads=threads or len(os.sched_getaffinity(0)))


def _verify_below(path: str, threads: int | None, *, as_json: bool) -> int:
    """Verify every checkpoint in a folder and below it; unfinished saves are only mentioned."""
    found = find(path, unfinished=True)
    reports: dict[str, VerifyReport] = {}
    unfinished = []
    for one in found:
        place = one.store.url if is_uri(path) else os.path.normpath(one.store.url)
        if one.unfinished:
            unfinished.append(place)
            continue
        reports[place] = _verify(place, threads)
        if not as_json:
            _print(place, reports[place])
    if not found:
        raise CheckpointNotFoundError(f"there is no checkpoint in {path} or below: check the path")
    sound = sum(report.ok for report in reports.values())
    if as_json:
        checkpoints = [_as_json(place, report) for place, report in reports.items()]
        print_json({"path": path, "ok": sound == len(reports), "checkpoints": checkpoints, "unfinished": unfinished})
    else:
        print_lines(
            (("unfinished", "yellow"), "  ", (place, "bold"), ": no .metadata, nothing to check")
            for place in unfinished
        )
        read = count_bytes(sum(report.bytes for report in reports.values()))
        print_line(f"{sound} of {len(reports)} checkpoints sound; {read} read")
    return 0 if sound == len(reports) else DIFFERENT


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
            f"{path} is a file, not a checkpoint's folder; files of other formats have no CRCs to verify"
        )


def _parent(path: str) -> str:
    """Return the folder or prefix above a checkpoint."""
    if is_uri(path):
        return path.rstrip("/").rpartition("/")[0]
    return (
        os.path.dirname(os.path.abspath(path))
        if os.path.basename(path) in ("", ".", "..")
        else (os.path.dirname(path) or ".")
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
    causes = [*_causes(report.problems)]
    read = f"{report.items} items, {count_bytes(report.bytes)} read"
    if report.ok:
        print_line(("sound", "green"), "    ", (path, "bold"), f": {read}")
    else:
        count = f"{len(causes)} problem{'s' if len(causes) != 1 else ''}"
        print_line(("damaged", "red"), "  ", (path, "bold"), f": {count}; {read}")
    print_lines([("  " + cause,) for cause in causes])
    if report.unverified_keys:
        some = ", ".join(sorted(report.unverified_keys)[:_SHOWN_KEYS])
        print_line(("  no CRC", "yellow"), f": {len(report.unverified_keys)} values, such as {some}")


def _causes(problems: tuple[Problem, ...]) -> Iterator[str]:
    """Yield one line for each cause: problems of one file that read alike are one."""
    groups: dict[tuple[str, str | None], list[Problem]] = defaultdict(list)
    for problem in problems:
        groups[problem.message, problem.file].append(problem)
    for (message, file), group in groups.items():
        keys = group[0].lost_keys or tuple(dict.fromkeys(one.key for one in group if one.key is not None))
        if len(group) == 1 and len(keys) < 2:
            yield message if "(file " in message else str(group[0])
            continue
        some = ", ".join(map(repr, keys[:_SHOWN_KEYS]))
        more = f" and {len(keys) - _SHOWN_KEYS} more" if len(keys) > _SHOWN_KEYS else ""
        count = "" if group[0].lost_keys else f" in {len(group)} places"
        yield f"file {file!r}: {message}{count}: {some}{more}" if file else f"{message}{count}: {some}{more}"
