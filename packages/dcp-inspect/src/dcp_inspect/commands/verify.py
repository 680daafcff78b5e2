"""`dcp verify`: check every byte of checkpoints against their indexes."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from dcp_base import DcpError
from dcp_inspect.arguments import LOCAL_FILE, PLACE, is_uri, parse_rate, parse_seconds
from dcp_inspect.contents import OtherFormatError, open_index
from dcp_inspect.errors import DIFFERENT, UNREADABLE, known, worst
from dcp_inspect.examples import examples
from dcp_inspect.listing import Listed, find, look_at
from dcp_inspect.printing.output import count_bytes, json_option, print_json, print_line, say
from dcp_io import LocalStore, Problem, VerifyReport, open_store, verify_checkpoint
from dcp_io.saves.cleanup import index_digest
from dcp_io.timed_call import Pace
from dcp_manifest import CheckpointNotFoundError, FoundCheckpoint, UnsupportedFormatError
from dcp_manifest.folders.folder import QUARANTINE

_SHOWN_KEYS = 4
_COLORS = {"sound": "green", "damaged": "red", "unreadable": "red", "unfinished": "yellow", "skipped": "dim"}


@dataclass(frozen=True, slots=True)
class _Result:
    path: str
    state: str
    """`sound`, `damaged`, `unreadable`, `unfinished`, or `skipped` (sound earlier)."""
    report: VerifyReport | None = None
    problem: str | None = None
    code: int = 0
    quarantined: bool = False

    def as_json(self) -> dict[str, object]:
        report = self.report or VerifyReport((), 0, 0)
        return {
            "path": self.path,
            "state": self.state,
            "ok": self.state in ("sound", "skipped"),
            "items": report.items,
            "bytes": report.bytes,
            "unverified": sorted(report.unverified_keys),
            "problems": [asdict(one) for one in report.problems],
            "problem": self.problem,
            "quarantined": self.quarantined,
        }


@click.command(
    "verify",
    epilog=examples(
        "dcp verify runs/step-100",
        "dcp verify runs/step-100 runs/step-200",
        "dcp verify -r runs                    # all checkpoints below a directory",
        "dcp verify -r runs --since 1d --skip-verified verified.json --rate 200MB/s --json-lines",
        "dcp verify s3://bucket/runs/step-100",
        "dcp verify runs/step-100 --json",
    ),
)
@click.argument("paths", type=PLACE, nargs=-1, required=True, metavar="PATH...")
@click.option("-r", "--recursive", is_flag=True, help="Check every checkpoint in PATH and the directories below it.")
@click.option("--threads", type=click.IntRange(1), help="Files read at the same time; the cores of this process.")
@click.option("--since", metavar="TIME", help="With -r, check only those saved in the last TIME, such as 12h or 1d.")
@click.option("--skip-verified", "state_file", type=LOCAL_FILE, metavar="FILE",
              help="Skip those that an earlier run with the same FILE found sound; FILE is updated.")  # fmt: skip
@click.option("--rate", metavar="RATE", help="Read no more than RATE, such as 200MB/s.")
@click.option("--json-lines", is_flag=True, help="Print one line of JSON for each checkpoint as soon as it is checked.")
@json_option
def command(
    paths: tuple[str, ...],
    recursive: bool,
    threads: int | None,
    since: str | None,
    state_file: str | None,
    rate: str | None,
    json_lines: bool,
    as_json: bool,
) -> int:
    """Check checkpoints completely: index, CRCs of all items, coverage of all tensors, missing files.

    Each byte is read once. The exit code is 1 if anything is damaged, and 4 if anything cannot be read; the rest is
    still checked. With --skip-verified, indexes and file sizes are checked again.
    """
    if since is not None and not recursive:
        raise click.UsageError("--since chooses among the checkpoints below a directory: add -r")
    verifier = _Verifier(threads, rate, None if state_file is None else _VerifiedState(state_file))
    if len(paths) == 1 and not recursive:
        results = iter([verifier.check_given(paths[0])])
    else:
        span = None if since is None else parse_seconds(since)
        results = _check_all(verifier, dict.fromkeys(paths), recursive=recursive, since=span)
    done: list[_Result] = []
    try:
        for one in results:
            done.append(one)
            if json_lines:
                print_json(one.as_json(), in_one_line=True)
            elif not as_json:
                _print(one)
    finally:
        problem = None if verifier.state is None else verifier.state.write()
    _finish(paths, done, recursive=recursive, as_json=as_json, json_lines=json_lines)
    if problem is not None:
        say(f"dcp: {problem}", err=True)
    codes = [one.code for one in done]
    return worst(codes if problem is None else [*codes, UNREADABLE])


def _finish(paths: tuple[str, ...], done: list[_Result], *, recursive: bool, as_json: bool, json_lines: bool) -> None:
    checked = [one for one in done if one.state != "unfinished"]
    single = len(paths) == 1 and not recursive
    if as_json and single:
        print_json(done[0].as_json())
    elif as_json:
        unfinished = [one.path for one in done if one.state == "unfinished"]
        checkpoints = [one.as_json() for one in checked]
        ok = worst([one.code for one in done]) == 0
        print_json({"paths": [*paths], "ok": ok, "checkpoints": checkpoints, "unfinished": unfinished})
    elif json_lines:
        return
    elif single:
        if done[0].state == "damaged":
            above = _parent(paths[0])
            print_line(f"load an earlier checkpoint (`dcp ls {above}` shows them), or restore files from a copy")
    else:
        count = {state: sum(one.state == state for one in checked) for state in _COLORS}
        read = count_bytes(sum(one.report.bytes for one in checked if one.report is not None))
        sound = count["sound"] + count["skipped"]
        skipped = f", {count['skipped']} of them by an earlier run" if count["skipped"] else ""
        unread = f", {count['unreadable']} cannot be read" if count["unreadable"] else ""
        total = f"{len(checked)} checkpoint{'s' * (len(checked) != 1)}"
        print_line(f"{sound} of {total} sound{skipped}{unread}; {read} read")


class _Verifier:
    def __init__(self, threads: int | None, rate: str | None, state: _VerifiedState | None) -> None:
        self._threads = threads or len(os.sched_getaffinity(0))
        self._pace = None if rate is None else Pace(parse_rate(rate))
        self.state = state

    def check_given(self, path: str) -> _Result:
        """Verify a given path; raise if no checkpoint is there."""
        if not is_uri(path):
            if not Path(path).exists():
                raise CheckpointNotFoundError(f"there is nothing at {path}: check the path")
            if not Path(path).is_dir():
                raise UnsupportedFormatError(
                    f"{path} is a file, not a checkpoint's directory; files of other formats have no CRCs to verify"
                )
        result = self.check(path)
        if result.report is not None and result.state == "damaged" and not result.report.items:
            _raise_if_missing(path)
        return result

    def check(self, path: str) -> _Result:
        store = open_store(path)
        names = [entry.name for entry in store.list()]
        before = index_digest(store, names)
        if self.state is not None and before and self.state.has(path, before):
            listed = look_at(FoundCheckpoint(store, 0.0))
            if listed.complete:
                return _Result(path, "skipped", problem="an earlier run found it sound")
        report = verify_checkpoint(store, threads=self._threads, on_read=self._pace)
        after = index_digest(store, [entry.name for entry in store.list()])
        if after != before and after:
            report = verify_checkpoint(store, threads=self._threads, on_read=self._pace)
        elif after != before:
            return _Result(path, "unfinished", problem="it was removed while its files were read")
        if self.state is not None:
            if report.ok:
                self.state.add(path, after)
            else:
                self.state.drop(path)
        state, code = ("sound", 0) if report.ok else ("damaged", DIFFERENT)
        return _Result(path, state, report, code=code, quarantined=QUARANTINE in names)


def _check_all(
    verifier: _Verifier, paths: dict[str, None], *, recursive: bool, since: float | None
) -> Iterator[_Result]:
    for path in paths:
        if not recursive:
            yield _or_error(path, lambda path=path: verifier.check_given(path))  # type: ignore[misc]
            continue
        try:
            found = _found(path)
        except Exception as error:
            if len(paths) == 1:
                raise
            yield _as_result(path, error)
            continue
        if verifier.state is not None:
            verifier.state.drop_missing(path, [one.store.url for one in found])
        for one in found:
            place = one.store.url if is_uri(path) else os.path.normpath(one.store.url)
            if since is None or one.unreadable is not None or _saved_seconds(one) > time.time() - since:
                yield _check_found(verifier, one, place)


def _found(path: str) -> list[FoundCheckpoint[Any]]:
    found = find(path, unfinished=True)
    if not found:
        raise CheckpointNotFoundError(f"there is no checkpoint in {path} or below: check the path")
    return found


def _check_found(verifier: _Verifier, found: FoundCheckpoint[Any], place: str) -> _Result:
    if found.unreadable is not None:
        return _Result(place, "unreadable", problem=f"cannot be read: {found.unreadable}", code=UNREADABLE)
    if found.unfinished:
        return _Result(place, "unfinished", problem="no .metadata, nothing to check")
    return _or_error(place, lambda: verifier.check(place))


def _saved_seconds(found: FoundCheckpoint[Any]) -> float:
    listed: Listed = look_at(found)
    return max(found.modified_seconds, (listed.created_ns or 0) / 1e9)


def _or_error(path: str, check: Callable[[], _Result]) -> _Result:
    try:
        return check()
    except Exception as error:  # noqa: BLE001 - bugs are raised again
        return _as_result(path, error)


def _as_result(path: str, error: Exception) -> _Result:
    code, message = known(error)
    return _Result(path, "unreadable", problem=message, code=code)


def _raise_if_missing(path: str) -> None:
    try:
        open_index(path)
    except (CheckpointNotFoundError, OtherFormatError):
        raise
    except DcpError:
        return


def _parent(path: str) -> str:
    if is_uri(path):
        return path.rstrip("/").rpartition("/")[0]
    return (
        os.path.dirname(os.path.abspath(path))
        if os.path.basename(path) in ("", ".", "..")
        else (os.path.dirname(path) or ".")
    )


def _print(one: _Result) -> None:
    state = (f"{one.state:<10}", _COLORS[one.state])
    if one.report is None:
        print_line(state, "  ", (one.path, "bold"), f": {one.problem}")
        return
    causes = [*_causes(one.report.problems)] if one.report.problems else []
    read = f"{one.report.items} item{'s' * (one.report.items != 1)}, {count_bytes(one.report.bytes)} read"
    count = "" if one.report.ok else f"{len(causes)} problem{'s' * (len(causes) != 1)}; "
    print_line(state, "  ", (one.path, "bold"), f": {count}{read}")
    for cause in causes:
        print_line("  " + cause)
    if one.quarantined and one.report.ok:
        print_line(("  quarantined", "yellow"), f": `dcp unquarantine {one.path}` lifts it")
    if one.report.unverified_keys:
        some = ", ".join(sorted(one.report.unverified_keys)[:_SHOWN_KEYS])
        values = "1 value" if len(one.report.unverified_keys) == 1 else f"{len(one.report.unverified_keys)} values"
        print_line(("  no CRC", "yellow"), f": {values}, such as {some}")


def _causes(problems: tuple[Problem, ...]) -> Iterator[str]:
    """Yield one line per cause: similar problems of one file share it."""
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
        count = "" if group[0].lost_keys else f" in {len(group)} place{'s' * (len(group) != 1)}"
        yield f"file {file!r}: {message}{count}: {some}{more}" if file else f"{message}{count}: {some}{more}"


_FORMAT = "dcp-verified/1"
_WRITE_SECONDS = 10.0


class _VerifiedState:
    """State file of `--skip-verified`: the sound checkpoints found, with digests of their indexes.

    Raises BadParameter for another kind of file, or without access.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._written = time.monotonic()
        self._sound: dict[str, dict[str, object]] = {}
        with contextlib.suppress(FileNotFoundError):
            self._sound = _parse(path)
        if problem := self.write():  # now, not after hours of reading
            raise click.BadParameter(problem)

    def has(self, place: str, digest: str) -> bool:
        """Whether this save was found sound."""
        return self._sound.get(_key(place), {}).get("index") == digest

    def add(self, place: str, digest: str) -> None:
        """Note a sound checkpoint; the file is written now and then."""
        self._sound[_key(place)] = {"index": digest, "verified_seconds": time.time()}
        if time.monotonic() - self._written > _WRITE_SECONDS:
            self.write()

    def drop(self, place: str) -> None:
        """Remove an entry."""
        self._sound.pop(_key(place), None)

    def drop_missing(self, above: str, found: Iterable[str]) -> None:
        """Remove the entries below a folder that were not found."""
        there, prefix = set(map(_key, found)), _key(above).rstrip("/") + "/"
        for place in [place for place in self._sound if place.startswith(prefix) and place not in there]:
            del self._sound[place]

    def write(self) -> str | None:
        """Write the file atomically, also in a crash; return why it cannot be written."""
        self._written = time.monotonic()
        try:
            folder, name = os.path.split(os.path.abspath(self._path))
            data = json.dumps({"format": _FORMAT, "checkpoints": self._sound}, indent=1)
            LocalStore(folder).publish(name, data.encode())
        except OSError as error:
            return f"{self._path} cannot be written: {error.strerror or error}"
        return None


def _parse(path: str) -> dict[str, dict[str, object]]:
    with open(path, "rb") as file:
        data = file.read()
    try:
        values = json.loads(data)
        known = {str(place): dict(entry) for place, entry in values["checkpoints"].items()}
        problem = None if values["format"] == _FORMAT else f"its format is {values['format']!r}"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = str(error)
    if problem is not None:
        raise click.BadParameter(
            f"{path} was not written by `dcp verify --skip-verified` ({problem}): name another file, or remove it"
        )
    return known


def _key(place: str) -> str:
    return place if is_uri(place) else os.path.realpath(place)
