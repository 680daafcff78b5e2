"""`prove_script`: the proof of an exact resume for a script."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from dcp_base.errors import DcpError
from dcp_prove.judging.judge_resumes import judge_resumes
from dcp_prove.judging.report import ResumeReport
from dcp_prove.observing.records import RunRecord
from dcp_prove.processes import RUN_TIMEOUT_SECONDS, make_folders, proof_folder, run_recorded

_ROOT = "{root}"


def prove_script(
    script: str | os.PathLike[str],
    arguments: Sequence[str] = (),
    *,
    kill_at_save: int = 1,
    world_sizes: Sequence[int] = (1,),
    tolerance: float | None = None,
    ignore: Iterable[str] = (),
    folder: str | None = None,
    timeout_seconds: float = RUN_TIMEOUT_SECONDS,
) -> ResumeReport:
    """Prove that a training script continues exactly when it is killed and started again.

    The script saves with a `CheckpointManager` or `save`, and resumes by itself. Its variables are observed after each
    optimizer step. It runs in its own directory, with links to the working directory's contents except for checkpoints.

    `{root}` in `arguments` stands for an empty directory for checkpoints. The script is killed after save number
    `kill_at_save`, from 1 on. Names in `ignore` begin with the name of a variable. See `prove_resume` for the others.

    Raises:
        DcpError: The script failed by itself, ended before the save, or had no training step.
    """
    path = Path(script).resolve()
    if not path.is_file():
        raise FileNotFoundError(f"{script}: there is no such script")
    with proof_folder(folder) as place:
        run = partial(_run, path, tuple(arguments), kill_at_save, place, timeout_seconds)
        return _prove(run, kill_at_save, [*dict.fromkeys(world_sizes)], tolerance, tuple(ignore))


def _prove(
    run: Callable[..., list[RunRecord]],
    kill_at_save: int,
    sizes: Sequence[int],
    tolerance: float | None,
    ignore: Sequence[str],
) -> ResumeReport:
    size = sizes[0]
    expected = run("uninterrupted", size)
    steps = max((moment.step for record in expected for moment in record.moments), default=0)
    report = ResumeReport(steps, size)
    killed = run("killed", size, kills=True)
    kill = max((moment.step for record in killed for moment in record.moments if moment.at == "killed"), default=0)
    if not 0 < kill < steps:
        raise DcpError(
            f"save {kill_at_save} was made after step {kill} of {steps} of the optimizers: there is nothing to "
            "compare. Choose another save (--kill-at-save), or let the script train longer"
        )

    def resume(other: int) -> Sequence[RunRecord]:
        return run(f"resumed-{other}", other, first_step=kill)

    judge_resumes(report, expected, killed, kill, sizes=sizes, resume=resume, tolerance=tolerance, ignore=ignore)
    return report


def _run(
    script: Path,
    arguments: tuple[str, ...],
    kill_at_save: int,
    place: Path,
    timeout_seconds: float,
    name: str,
    world_size: int,
    *,
    kills: bool = False,
    first_step: int | None = None,
) -> list[RunRecord]:
    """`first_step` is set in a run that resumes after the kill."""
    folder = place / name
    make_folders(folder, ["work", "root"], None if first_step is None else place / "killed")
    if first_step is None:
        _link_all(Path.cwd(), folder / "work", without=place)
    job = {
        "script": str(script),
        "arguments": [each.replace(_ROOT, str(folder / "root")) for each in arguments],
        "sys_path": [str(Path(entry).resolve()) for entry in sys.path if entry],
        "kill_at_save": kill_at_save,
        "kills": kills,
        "first_step": first_step,
    }
    found = run_recorded(
        "dcp_prove.script_rank:run_script",
        job,
        world_size,
        folder,
        what=f"the {f'{name} run' if first_step is None else name.replace('-', ' run on ')} of {script.name}",
        killed=kills,
        timeout_seconds=timeout_seconds,
        working_folder=folder / "work",
    )
    if not kills and not all(record.steps() for record in found):
        raise DcpError(f"the {name} run of {script.name}: no step of an optimizer of torch.optim was seen")
    return found


def _link_all(source: Path, target: Path, *, without: Path) -> None:
    for entry in source.iterdir():
        if entry == without or entry in without.parents or (entry.is_dir() and _has_checkpoints(entry)):
            continue
        (target / entry.name).symlink_to(entry)


def _has_checkpoints(folder: Path) -> bool:
    try:
        return any(next(folder.glob(pattern), None) is not None for pattern in (".metadata", "*/.metadata"))
    except PermissionError:
        return False
