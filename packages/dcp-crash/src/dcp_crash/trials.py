"""Trials of a program: run it with one fault at a time, let it resume, and judge the files that are left.

Every trial begins with the directory as it was before the first one. The program must be able to run again: the first
run, without a fault, counts its calls and makes the expected files.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dcp_crash.calls import WRITES
from dcp_crash.disk import Tree, disk_states, replay, snapshot
from dcp_crash.faults import WRITING, Fault
from dcp_crash.recording import Call, Change
from dcp_crash.running import Run, run_traced

FAULTS = ("kill", "torn", "short", "eio", "enospc", "power")
_SPACE = frozenset(kind.name for kind in WRITES if kind.space)
_ENDED = Change("mark", "the program has ended")
_TIMED_OUT = "timeout"
_SHOWN_LINES = 20
_DIGEST_BYTES = 1 << 20
Status = int | str
"""Exit status, the name of a signal, or `timeout`."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """The program, and how to judge the files that a fault leaves."""

    program: Sequence[str]
    folder: Path
    resume: Sequence[str] | None
    """Command that runs after the fault; None judges the files as they are."""
    check: Sequence[str] | None = None
    """Command whose exit status 0 means that nothing was lost."""
    compare: Sequence[Path] = ()
    """Files that must have the bytes of the run without a fault."""
    timeout_seconds: float = 300.0
    keep: Path | None = None
    """Directory for copies of the files that a fault left, before the resume, if something was lost."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The chosen points of all that a fault could meet: each n-th call, or a random sample."""

    every: int = 1
    sample: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Trial:
    """One fault and its outcome."""

    fault: str
    call: int
    """Number of the system call, from 1; for `power`, of changes before it."""
    system_call: str
    path: str
    """Path in the directory, and the target of a rename."""
    disk: str | None
    """Unsynced changes that reached the disk, for `power`."""
    program: Status | None
    """Exit of the program; None for `power`, before its end."""
    resume: Status | None
    verdict: Literal["held", "lost", "hung", "missed"]
    """`hung`: the program did not end after the fault. `missed`: it made fewer calls than in the first run."""
    reason: str = ""


class Trials:
    """Trials of one program; a context manager that restores the directory at the end.

    Raises:
        RuntimeError: The program or the judgement fails without a fault, or changes files untraced.
        OSError: System calls cannot be traced here, or a file cannot be copied.
    """

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self.calls: list[Call] = []
        """Calls of the run without a fault."""
        self.same_calls = True
        """Whether a second run without a fault made the same calls."""
        self._before: Tree = {}
        self._changes: list[Change] = []
        self._old: list[str | None] = []
        self._new: list[str | None] = []

    def __enter__(self) -> Trials:
        self._work = Path(tempfile.mkdtemp(prefix="dcp-crash-"))
        self._output = self._work / "output"
        try:
            self._originals = _Originals(self.experiment, self._work)
        except BaseException:
            shutil.rmtree(self._work)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # An impatient user's second interrupt waits.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            self._originals.restore()
            self._originals.remove_if_new()
            shutil.rmtree(self._work)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def run_without_fault(self, *, record: bool) -> None:
        """Run the program twice without a fault: count and record its calls, and check that the judgement holds."""
        folder = self.experiment.folder
        self._originals.restore()
        self._before = snapshot(folder) if record else {}
        self._old = self._digests()
        run = self._run_whole(record=record)
        self.calls, self._changes, self._new = run.calls, [*run.changes, _ENDED], self._digests()
        if not run.calls:
            raise RuntimeError(f"{folder}: the program does not change this directory, so there is nothing to try")
        absent = [str(path) for path, digest in zip(self.experiment.compare, self._new, strict=True) if digest is None]
        if absent:
            raise RuntimeError(f"{absent[0]}: to be compared, but not there after a run without a fault")
        if record:
            _check_recording(replay(self._before, run.changes), snapshot(folder))
        self._originals.restore()
        again = self._run_whole(record=False).calls
        self.same_calls = [call.name for call in again] == [call.name for call in run.calls]
        _, reason = self._judge("no-fault", finished=True)
        if reason:
            advice = "are seeds fixed, and are times left out of the files?" if self.experiment.compare else ""
            raise RuntimeError(f"also without any fault: {reason}\n{advice}".rstrip())

    def points(self, fault: str, chosen: Chosen) -> list[int]:
        """Return the numbers of the calls that a fault of a process meets."""
        limits = {"torn": WRITING, "short": WRITING, "enospc": _SPACE}
        found = [n for n, call in enumerate(self.calls, 1) if call.name in limits.get(fault, {call.name})]
        if chosen.sample is not None and chosen.sample < len(found):
            return sorted(random.Random(f"{chosen.seed} {fault}").sample(found, chosen.sample))
        return found[:: chosen.every]

    def run(self, fault: str, chosen: Chosen) -> Iterator[Trial]:
        """Try one kind of fault at the chosen points."""
        if fault == "power":
            return self._lose_power(chosen)
        return (self._strike(Fault(fault, at, of="all")) for at in self.points(fault, chosen))  # type: ignore[arg-type]

    def _strike(self, fault: Fault) -> Trial:
        self._originals.restore()
        call = self.calls[fault.at - 1]
        status: Status = _TIMED_OUT
        with contextlib.suppress(TimeoutError):
            run = self._run(fault=fault)
            status = _status(run)
            if not run.struck:
                return Trial(fault.kind, fault.at, *_shown(call, self.experiment.folder), None, status, None, "missed")
            call = run.calls[fault.at - 1]
        resumed, reason = self._judge(f"{fault.kind}-{fault.at}", finished=status == 0)
        verdict: Literal["held", "lost", "hung"] = "lost" if reason else "held"
        if status == _TIMED_OUT and not reason:
            verdict, reason = "hung", f"the program did not end within {self.experiment.timeout_seconds:g} s"
        shown = _shown(call, self.experiment.folder)
        return Trial(fault.kind, fault.at, *shown, None, status, resumed, verdict, reason)

    def _lose_power(self, chosen: Chosen) -> Iterator[Trial]:
        folder = self.experiment.folder
        states = disk_states(self._before, self._changes, every=chosen.every, seed=chosen.seed, sample=chosen.sample)
        for number, state in enumerate(states, 1):
            self._originals.restore()
            _empty(folder)
            state.put(folder, recorded=folder)
            ended = _ENDED.path in state.marks
            last = (
                self._changes[state.at - 1]
                if state.at and not ended
                else Change("end" if ended else "begin", str(folder))
            )
            path = _path([last.path, last.target if last.kind in {"rename", "link"} else ""], folder)
            resumed, reason = self._judge(f"power-{number}-at-{state.at - ended}", finished=ended)
            verdict: Literal["held", "lost"] = "lost" if reason else "held"
            status = 0 if ended else None
            yield Trial("power", state.at - ended, last.kind, path, state.how, status, resumed, verdict, reason)

    def _run(self, *, fault: Fault | None = None, record: bool = False) -> Run:
        return run_traced(
            self.experiment.program,
            self.experiment.folder,
            fault=fault,
            record=record,
            output=self._output,
            timeout_seconds=self.experiment.timeout_seconds,
        )

    def _run_whole(self, *, record: bool) -> Run:
        run = self._run(record=record)
        status = _status(run)
        if status != 0:
            lines = self._output.read_text(errors="replace").rstrip().split("\n")
            printed = "\n".join(lines[-_SHOWN_LINES:])
            raise RuntimeError(f"the program fails without any fault, with {status}. It printed:\n{printed}")
        return run

    def _judge(self, name: str, *, finished: bool) -> tuple[Status | None, str]:
        """Resume, compare and check; return the exit of the resume, and what is wrong."""
        keep = self.experiment.keep
        if keep is None:
            return self._resume(finished=finished)
        left = self._work / "left"
        shutil.copytree(self.experiment.folder, left, symlinks=True)
        found = self._resume(finished=finished)
        if found[1]:
            shutil.rmtree(keep / name, ignore_errors=True)
            shutil.move(left, keep / name)
        else:
            shutil.rmtree(left)
        return found

    def _resume(self, *, finished: bool) -> tuple[Status | None, str]:
        resumed: Status | None = None
        if self.experiment.resume is not None:
            resumed = self._command(self.experiment.resume)
            if resumed != 0:
                return resumed, f"the resume ended with {resumed}: {self._last_line()}"
        reason = self._compare(may_be_old=self.experiment.resume is None and not finished)
        if not reason and self.experiment.check is not None:
            status = self._command(self.experiment.check)
            reason = "" if status == 0 else f"the check ended with {status}: {self._last_line()}"
        return resumed, reason

    def _compare(self, *, may_be_old: bool) -> str:
        found = self._digests()
        if found == self._new or (may_be_old and found == self._old):
            return ""
        wanted = [*zip(self.experiment.compare, found, self._old, self._new, strict=True)]
        for path, is_there, old, new in wanted:
            if is_there not in ({old, new} if may_be_old else {new}):
                others = "is the old file" if is_there == old else "has other bytes"
                return f"{path} {'is missing' if is_there is None else others}"
        names = [str(path) for path, is_there, _, new in wanted if is_there == new]
        return f"{', '.join(names)} new, and other compared files old"

    def _digests(self) -> list[str | None]:
        return [_digest(path) for path in self.experiment.compare]

    def _command(self, command: Sequence[str]) -> Status:
        with (
            open(self._output, "wb") as output,
            subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            ) as process,
        ):
            try:
                status = process.wait(self.experiment.timeout_seconds)
            except subprocess.TimeoutExpired:
                return _TIMED_OUT
            finally:
                with contextlib.suppress(ProcessLookupError):  # what it started would write into the next trial
                    os.killpg(process.pid, signal.SIGKILL)
        return status if status >= 0 else signal.Signals(-status).name

    def _last_line(self) -> str:
        lines = self._output.read_text(errors="replace").split("\n")
        return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "it printed nothing")


class _Originals:
    """Copies of the directory, and of compared files elsewhere, as they were before all trials."""

    def __init__(self, experiment: Experiment, work: Path) -> None:
        self._folder = experiment.folder
        self._is_new = not self._folder.exists()
        self._folder.mkdir(exist_ok=True)
        self._copy = work / "folder"
        shutil.copytree(self._folder, self._copy, symlinks=True)
        outside = [path for path in experiment.compare if self._folder not in path.resolve().parents]
        self._files = {path: work / f"file-{number}" for number, path in enumerate(outside)}
        for path, copy in self._files.items():
            if path.exists():
                shutil.copy2(path, copy)

    def restore(self) -> None:
        self._folder.mkdir(exist_ok=True)
        try:
            _empty(self._folder)
            shutil.copytree(self._copy, self._folder, symlinks=True, dirs_exist_ok=True)
        except OSError as error:
            raise OSError(f"{self._folder} could not be restored; its contents are in {self._copy}: {error}") from error
        for path, copy in self._files.items():
            path.unlink(missing_ok=True)
            if copy.exists():
                shutil.copy2(copy, path)

    def remove_if_new(self) -> None:
        if self._is_new:
            self._folder.rmdir()


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _digest(path: Path) -> str | None:
    found = hashlib.blake2b(digest_size=16)
    try:
        with open(path, "rb") as file:
            while data := file.read(_DIGEST_BYTES):
                found.update(data)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.hexdigest()


def _check_recording(recorded: Tree, there: Tree) -> None:
    different = [
        path for path in sorted({*recorded, *there}) if recorded.get(path, "absent") != there.get(path, "absent")
    ]
    if different:
        raise RuntimeError(
            f"{different[0]}: changed by other means than traced system calls, such as mmap, io_uring or a process "
            "that was already running. A loss of power cannot be simulated: leave power out of --fault"
        )


def _status(run: Run) -> Status:
    (end,) = run.ranks
    return end.status if end.signal is None else signal.Signals(end.signal).name


def _shown(call: Call, folder: Path) -> tuple[str, str]:
    return call.name, _path(call.places, folder)


def _path(places: Sequence[str], folder: Path) -> str:
    return " -> ".join(dict.fromkeys(os.path.relpath(place, folder) for place in places if place))
