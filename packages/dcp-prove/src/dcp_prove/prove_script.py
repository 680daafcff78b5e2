"""`prove_script`: the proof of an exact resume for a script."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcp_base.errors import DcpError
from dcp_prove.judging.judge_resumes import judge_resumes
from dcp_prove.judging.report import ResumeReport
from dcp_prove.observing.records import RunRecord, read_record
from dcp_prove.processes import RUN_TIMEOUT_SECONDS, run_ranks

_PROGRAM = (
    "import sys; from dcp_prove.processes import end_with_parent; end_with_parent(); "
    "from dcp_prove.script_rank import run_script; run_script(sys.argv[1])"
)
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
    place = Path(folder or tempfile.mkdtemp(prefix="dcp-prove-")).resolve()
    try:
        runs = _ScriptRuns(path, tuple(arguments), kill_at_save, place, timeout_seconds)
        return _prove(runs, [*dict.fromkeys(world_sizes)], tolerance, tuple(ignore))
    finally:
        if folder is None:
            shutil.rmtree(place, ignore_errors=True)


def _prove(runs: _ScriptRuns, sizes: Sequence[int], tolerance: float | None, ignore: Sequence[str]) -> ResumeReport:
    size = sizes[0]
    expected = runs.run("uninterrupted", size)
    steps = max((moment.step for record in expected for moment in record.moments), default=0)
    report = ResumeReport(steps, size)
    killed = runs.run("killed", size, kills=True)
    kill = max((moment.step for record in killed for moment in record.moments if moment.at == "killed"), default=0)
    if not 0 < kill < steps:
        raise DcpError(
            f"save {runs.kill_at_save} was made after step {kill} of {steps} of the optimizers: there is nothing to "
            "compare. Choose another save (--kill-at-save), or let the script train longer"
        )

    def resume(other: int) -> Sequence[RunRecord]:
        return runs.run(f"resumed-{other}", other, first_step=kill, resume_from="killed")

    judge_resumes(report, expected, killed, kill, sizes=sizes, resume=resume, tolerance=tolerance, ignore=ignore)
    return report


@dataclass(frozen=True, slots=True)
class _ScriptRuns:
    script: Path
    arguments: tuple[str, ...]
    kill_at_save: int
    place: Path
    timeout_seconds: float

    def run(
        self,
        name: str,
        world_size: int,
        *,
        kills: bool = False,
        first_step: int | None = None,
        resume_from: str | None = None,
    ) -> list[RunRecord]:
        """`resume_from` names the killed run."""
        folder = self.place / name
        shutil.rmtree(folder, ignore_errors=True)
        for part in ("work", "root"):
            if resume_from is None:
                (folder / part).mkdir(parents=True)
            else:
                shutil.copytree(self.place / resume_from / part, folder / part, symlinks=True)
        if resume_from is None:
            _link_all(Path.cwd(), folder / "work", without=self.place)
        job: dict[str, Any] = {
            "script": str(self.script),
            "arguments": [each.replace(_ROOT, str(folder / "root")) for each in self.arguments],
            "sys_path": [str(Path(entry).resolve()) for entry in sys.path if entry],
            "records": str(folder),
            "kill_at_save": self.kill_at_save,
            "kills": kills,
            "first_step": first_step,
        }
        run_ranks(
            [sys.executable, "-c", _PROGRAM, json.dumps(job)],
            world_size,
            folder,
            what=f"the {name.replace('-', ' run on ') if resume_from else f'{name} run'} of {self.script.name}",
            killed=kills,
            timeout_seconds=self.timeout_seconds,
            working_folder=folder / "work",
        )
        records = [folder / f"rank{rank}.jsonl" for rank in range(world_size)]
        found = [read_record(path) for path in records]
        if not kills and not all(record.steps() for record in found):
            raise DcpError(f"the {name} run of {self.script.name}: no step of an optimizer of torch.optim was seen")
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
