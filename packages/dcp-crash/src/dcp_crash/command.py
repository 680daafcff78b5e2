"""The command `dcp-crash`: run a program once for each fault, and report what was lost."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dcp_crash import kernel
from dcp_crash.trials import FAULTS, Chosen, Experiment, Trial, Trials

_LOST, _USAGE, _INTERRUPTED = 1, 2, 130
_SAMPLE = 100
_USAGE_LINE = "dcp-crash run --dir DIR [options] -- PROGRAM [ARGUMENT ...]"
_DESCRIPTION = """\
Run a program once for each system call that changes DIR, with a fault at that
call. After each fault, run it again to resume, and judge what was left.

First, the program runs twice without a fault. This counts the calls, and shows
that resume, comparison and check succeed when nothing fails. Before each trial,
DIR is restored to its present contents, and also at the end. A copy is kept in
the directory for temporary files meanwhile. Processes and threads that the
program starts are included.
"""
_EPILOG = """\
faults:
  kill    SIGKILL to the program and all that it started, before the call
  torn    the same, when half of a write is done
  short   a write writes half, and reports that
  eio     the call fails with EIO, once
  enospc  this call and all later ones that need space fail with ENOSPC
  power   the machine loses power: the disk keeps all synced data, and any part
          of the rest. The states of the disk are computed from a recorded run

verdicts:
  held    the program resumed, and nothing was lost
  lost    the resume or the check failed, or a compared file differs
  hung    the program did not end after the fault, and nothing was lost
  missed  the program made fewer calls than at first; not counted

examples:
  dcp-crash run --dir ckpt -- python train.py
  dcp-crash run --dir ckpt --compare ckpt/final.pt -- python train.py
  dcp-crash run --dir etc --no-resume --compare etc/settings -- ./save-settings
  dcp-crash run --dir ckpt --resume 'python train.py --resume' \\
      --check 'python check.py' --fault kill,power --sample 20 -- python train.py

exit status: 0 all held, 1 something was lost or hung, 2 wrong use, or the
program fails without a fault.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    given = sys.argv[1:] if arguments is None else [*arguments]
    before, program = given, None
    if "--" in given:
        before, program = given[: given.index("--")], given[given.index("--") + 1 :]
    parser, run = _parsers()
    options = parser.parse_args(before)
    experiment = _experiment(run, options, program or [])
    terminated = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _run(experiment, options)
    except KeyboardInterrupt:
        _error("interrupted; the directory is restored")
        return _INTERRUPTED
    except (OSError, RuntimeError) as error:
        _error(str(error))
        return _USAGE
    finally:
        signal.signal(signal.SIGTERM, terminated)


def _parsers() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    formatting: Any = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "dcp-crash", description="Crash tests of programs that write files. See dcp-crash run --help."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('dcp-crash')}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    run = commands.add_parser(
        "run",
        usage=_USAGE_LINE,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=formatting,
        help="run a program once for each fault, and report what was lost",
    )
    run.add_argument("--dir", type=Path, required=True, metavar="DIR", help="the directory that the program writes")
    run.add_argument(
        "--fault", type=_faults, default=FAULTS, metavar="LIST", help=f"faults, by default {','.join(FAULTS)}"
    )
    points = run.add_mutually_exclusive_group()
    points.add_argument("--every", type=_positive, metavar="N", help="each N-th call, and all states of the disk there")
    points.add_argument(
        "--sample", type=_positive, default=_SAMPLE, metavar="N", help="at most N random points per fault; default: 100"
    )
    run.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the random points; default: 0")
    resume = run.add_mutually_exclusive_group()
    resume.add_argument("--resume", metavar="COMMAND", help="run after each fault; default: the program itself")
    resume.add_argument(
        "--no-resume", action="store_true", help="judge the files at once: compared files are all old, or all new"
    )
    run.add_argument(
        "--check", metavar="COMMAND", help="run after the resume: exit status 0 means that nothing was lost"
    )
    run.add_argument(
        "--compare", type=Path, nargs="+", default=[], metavar="FILE", help="equal to those of a run without a fault"
    )
    run.add_argument(
        "--timeout", type=_seconds, default=300.0, metavar="SECONDS", help="limit of each run; default: 300"
    )
    run.add_argument("--keep", type=Path, metavar="DIR", help="directory for what was left when something was lost")
    run.add_argument("--json", action="store_true", help="print JSON when all trials are done")
    return parser, run


def _faults(text: str) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(text.split(",")))
    unknown = [name for name in found if name not in FAULTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not a fault; choose from {', '.join(FAULTS)}")
    return found


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return found


def _experiment(parser: argparse.ArgumentParser, options: argparse.Namespace, program: list[str]) -> Experiment:
    obstacle = kernel.obstacle()
    if obstacle:
        parser.exit(_USAGE, f"dcp-crash: {obstacle}\n")
    if not program:
        parser.error("name the program after --, such as: dcp-crash run --dir ckpt -- python train.py")
    if shutil.which(program[0]) is None:
        parser.error(f"{program[0]}: no such program")
    folder = Path(os.path.realpath(options.dir))
    if folder.exists() and not folder.is_dir():
        parser.error(f"--dir {options.dir}: not a directory")
    if any(
        folder in (place, *place.parents) for place in map(Path, map(os.path.realpath, (".", os.path.expanduser("~"))))
    ):
        parser.error(
            f"--dir {options.dir}: its contents are removed and restored many times, so it must not contain the "
            "current directory or your home: name a directory that only the program's files are in"
        )
    if options.no_resume and not options.check and not options.compare:
        parser.error("--no-resume needs --compare or --check, or nothing would be judged")
    if options.keep and folder in (kept := Path(os.path.realpath(options.keep)), *kept.parents):
        parser.error(f"--keep {options.keep}: in the directory of --dir, which is restored")
    resume = None if options.no_resume else _shell(options.resume) or program
    return Experiment(program, folder, resume, _shell(options.check), options.compare, options.timeout, options.keep)


def _shell(command: str | None) -> list[str] | None:
    return ["/bin/sh", "-c", command] if command else None


def _run(experiment: Experiment, options: argparse.Namespace) -> int:
    chosen = Chosen(options.every or 1, None if options.every else options.sample, options.seed)
    done: list[Trial] = []
    with Trials(experiment) as trials:
        _progress("running the program without a fault")
        trials.run_without_fault(record="power" in options.fault)
        if not options.json:
            _print_head(trials, options)
        for trial in _all(trials, options.fault, chosen):
            done.append(trial)
            if not options.json:
                _print(_row(trial))
        _progress("")
    if not any(trial.verdict != "missed" for trial in done):
        raise RuntimeError("no fault met a call of the program: choose other faults")
    counts: Counter[str] = Counter(trial.verdict for trial in done)
    if options.json:
        document = {
            "program": experiment.program,
            "dir": str(options.dir),
            "seed": options.seed,
            "calls": len(trials.calls),
            "counts": counts,
            "trials": [asdict(trial) for trial in done],
        }
        _print(json.dumps(document, indent=2))
    else:
        _print_summary(done, counts)
    return _LOST if counts["lost"] or counts["hung"] else 0


def _all(trials: Trials, faults: Sequence[str], chosen: Chosen) -> Iterator[Trial]:
    for fault in faults:
        of = "" if fault == "power" else f" of {len(trials.points(fault, chosen))}"
        _progress(f"{fault}: 0{of} done")
        for number, trial in enumerate(trials.run(fault, chosen), start=1):
            yield trial
            _progress(f"{fault}: {number}{of} done")


def _print_head(trials: Trials, options: argparse.Namespace) -> None:
    program = shlex.join(trials.experiment.program)
    _print(f"{len(trials.calls)} system calls of `{program}` change {options.dir}.")
    if not trials.same_calls:
        _print("A second run made other calls, so the n-th call is not the same in each run.")
    _print(f"\n{'fault':7s} {'call':>5s}  {'system call':16s} {'program':8s} {'resume':8s} {'verdict':7s}  path")


def _row(trial: Trial) -> str:
    program, resume = ("-" if status is None else str(status) for status in (trial.program, trial.resume))
    met = f"{trial.fault:7s} {trial.call:5d}  {trial.system_call:16s}"
    row = f"{met} {program:8s} {resume:8s} {trial.verdict:7s}  {trial.path}"
    if not trial.reason:
        return row
    disk = f"\n{'':15s}on the disk: {trial.disk}" if trial.disk else ""
    return f"{row}\n{'':15s}{trial.reason}{disk}"


def _print_summary(done: Sequence[Trial], counts: Counter[str]) -> None:
    _print("")
    for fault in dict.fromkeys(trial.fault for trial in done):
        found = Counter(trial.verdict for trial in done if trial.fault == fault)
        _print(f"{fault:7s} {', '.join(f'{number} {verdict}' for verdict, number in sorted(found.items()))}")
    bad = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("lost", "hung") if counts[verdict])
    _print(f"{bad} of {len(done)} trials" if bad else f"all {counts['held']} trials held")


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() or char == "\n" else "?" for char in text)


def _print(text: str) -> None:
    _progress("")
    sys.stdout.write(_printable(text).encode(errors="replace").decode() + "\n")
    sys.stdout.flush()


def _error(text: str) -> None:
    _progress("")
    sys.stderr.write(f"dcp-crash: {_printable(text)}\n")


def _progress(text: str) -> None:
    """Show a line that the next one replaces, on a terminal only."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()
