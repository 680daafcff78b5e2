"""`prove_resume`: trains without an interruption, then with a kill and a resume, and compares both."""

from __future__ import annotations

import base64
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dcp_prove.judging.judge_resumes import judge_resumes
from dcp_prove.judging.report import ResumeReport
from dcp_prove.observing.records import RunRecord
from dcp_prove.processes import RUN_TIMEOUT_SECONDS, make_folders, proof_folder, run_recorded
from dcp_prove.trainer import Trainer


def prove_resume(
    make_trainer: Callable[[str], Trainer],
    steps: int,
    kill_at: int | Iterable[int],
    world_sizes: int | Iterable[int] = (1,),
    *,
    check: bool = True,
    tolerance: float | None = None,
    ignore: Iterable[str] = (),
    backend: str = "gloo",
    folder: str | None = None,
    timeout_seconds: float = RUN_TIMEOUT_SECONDS,
) -> ResumeReport:
    """Prove that a training continues after a kill as if it had never been interrupted, or say what is missing.

    Train `steps` steps without an interruption; train `kill_at` steps, save, and kill by SIGKILL; resume in new
    processes. Everything reachable from the trainer is compared, the global random states, and what data loaders and
    models read: bit by bit on as many ranks, as far as possible on other numbers of ranks.

    Args:
        make_trainer: Function (directory) → `Trainer`, of a module, or a `functools.partial` of one. It is called on
            each rank of each run, in a new process, with an initialised process group if there are several ranks. The
            directory for checkpoints is empty at first, and the same for all ranks and for the resume.
        steps: Number of steps of the uninterrupted run.
        kill_at: Number of steps before the kill, from 1 to `steps` - 1, or several to try. The uninterrupted run saves
            after the same steps.
        world_sizes: Numbers of ranks: the first one for the uninterrupted and the killed run, each for the resume.
        check: Whether to raise an error if a resumed run differs.
        tolerance: Largest relative difference of losses on other numbers of ranks; None for 1e-8 (parameters in
            float64), 1e-4 (float32) or 1e-2 (float16, bfloat16).
        ignore: Names of parts of the state that need not be equal, with `*` for any text: `trainer.history*`.
        backend: Backend of the process group.
        folder: Directory for checkpoints, records and output, which is kept; None for a temporary one.
        timeout_seconds: Time after which one run is ended as failed.

    Returns:
        The report. `print` shows it; `report.ok` and `report.omissions` are for programs.

    Raises:
        ResumeError: With `check`: a resumed run differs, or the training is not deterministic.
        DcpError: A run failed by itself; with the output of the rank.
        TypeError: `make_trainer` cannot be called in another process.

    Ranks: called in one process, which starts the processes of the ranks.

    `docs/prove-a-resume.md` has a test to copy.
    """
    kills = sorted({kill_at} if isinstance(kill_at, int) else {*kill_at})
    sizes = [world_sizes] if isinstance(world_sizes, int) else [*dict.fromkeys(world_sizes)]
    if not kills or not all(0 < kill < steps for kill in kills):
        raise ValueError(f"kill_at is {kill_at!r}; it must be at least 1 and less than steps ({steps})")
    if not sizes or min(sizes) < 1:
        raise ValueError(f"world_sizes is {world_sizes!r}; it must be one or more numbers of ranks, at least 1")
    job = {**pickled_factory(make_trainer), "steps": steps, "backend": backend}
    with proof_folder(folder) as place:
        report = prove_job(job, kills, sizes, place, tolerance, tuple(ignore), timeout_seconds)
    if check:
        report.raise_if_different()
    return report


def prove_job(
    job: Mapping[str, Any],
    kills: Sequence[int],
    sizes: Sequence[int],
    place: Path,
    tolerance: float | None,
    ignore: Sequence[str],
    timeout_seconds: float,
) -> ResumeReport:
    """Run a job without a kill, with each kill, and its resumes; return the report."""
    steps, size = job["steps"], sizes[0]

    def train(name: str, world_size: int, *, kill: int | None = None, first_step: int = 0) -> list[RunRecord]:
        folder = place / name
        make_folders(folder, ["checkpoints"], place / f"killed-{first_step}" if first_step else None)
        run = {
            **job,
            "root": str(folder / "checkpoints"),
            "first_step": first_step,
            "kill_at": kill,
            "save_at": [each for each in kills if each > first_step and (kill is None or each <= kill)],
            "full_at": [*kills, *(each + 1 for each in kills), steps],
        }
        what = f"the {name.partition('-')[0]} run"
        options: dict[str, Any] = {"what": what, "killed": kill is not None, "timeout_seconds": timeout_seconds}
        return run_recorded("dcp_prove.rank:run_rank", run, world_size, folder, **options)

    report = ResumeReport(steps, size)
    expected = train("uninterrupted", size)
    for kill in kills:
        killed = train(f"killed-{kill}", size, kill=kill)

        def resume(other: int, kill: int = kill) -> list[RunRecord]:
            return train(f"resumed-{kill}-{other}", other, first_step=kill)

        judge_resumes(report, expected, killed, kill, sizes=sizes, resume=resume, tolerance=tolerance, ignore=ignore)
        if report.unsteady:
            break
    return report


def pickled_factory(make_trainer: Any) -> dict[str, Any]:
    """Return the data with which another process finds `make_trainer`, or raise TypeError if it is not in a module."""
    if not callable(make_trainer):
        raise TypeError(f"make_trainer is {make_trainer!r}; it must be a function (directory) → trainer")
    function = make_trainer
    while isinstance(function, partial):
        function = function.func
    name = getattr(function, "__module__", None) or type(function).__module__
    file = getattr(sys.modules.get(name), "__file__", None)
    try:
        data = pickle.dumps(make_trainer)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"make_trainer is {make_trainer!r}, which new processes cannot import ({error}); it must be a function or "
            "class at the top level of a module, or functools.partial of one with plain arguments"
        ) from error
    if file is None and name != "builtins":
        raise TypeError(
            f"make_trainer is in {name}, which has no file; write it to a module, which processes can import"
        )
    modules = {name: str(Path(file).resolve())} if file is not None else {}
    return {
        "make_trainer": base64.b64encode(data).decode(),
        "modules": modules,
        "sys_path": [str(Path(entry or ".").resolve()) for entry in sys.path],
    }
