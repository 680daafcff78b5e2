"""`dcp prove`: prove that a training script resumes exactly, or name what is missing from its checkpoints."""

from __future__ import annotations

import json

import click

from dcp_base import DcpError
from dcp_prove.processes import RUN_TIMEOUT_SECONDS
from dcp_prove.prove_script import prove_script

_EXAMPLES = (
    "\b\nExamples:\n  dcp prove train.py\n  dcp prove --world-sizes 2,1 --kill-at-save 3 train.py --out '{root}'\n"
    "  dcp prove --json --ignore 'history*' train.py"
)


def _sizes(_context: click.Context, _option: click.Parameter, text: str) -> list[int]:
    sizes = [int(part) if part.isdecimal() else 0 for part in text.split(",")]
    if min(sizes) < 1:
        raise click.BadParameter(f"{text!r} is not a list of numbers of ranks; write it like 2,1")
    return sizes


@click.command("prove", epilog=_EXAMPLES, context_settings={"allow_interspersed_args": False})
@click.option(
    "--kill-at-save", type=click.IntRange(min=1), default=1, metavar="N", help="Kill after the N-th save (1)."
)
@click.option(
    "--world-sizes", default="1", metavar="N,…", callback=_sizes, help="Ranks of the run, then of resumes (1)."
)
@click.option("--tolerance", type=float, metavar="X", help="Relative difference of losses on other numbers of ranks.")
@click.option("--ignore", multiple=True, metavar="NAME", help="Part that may differ, such as 'history*'.")
@click.option("--keep", metavar="DIRECTORY", help="Directory for checkpoints, records and output, which is kept.")
@click.option("--timeout-seconds", type=float, default=RUN_TIMEOUT_SECONDS, help="Limit of each run (600).")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    kill_at_save: int,
    world_sizes: list[int],
    tolerance: float | None,
    ignore: tuple[str, ...],
    keep: str | None,
    timeout_seconds: float,
    as_json: bool,
    script: str,
    arguments: tuple[str, ...],
) -> int:
    """Prove that a training SCRIPT resumes exactly, or name what is missing from its checkpoints.

    The script runs to its end; it runs again, is killed (SIGKILL) after a save, and is started a third time, so that it
    resumes. Both ways are compared bit by bit after each step of the optimizer: losses, samples, parameters, optimizer,
    scheduler, scaler, moving averages, buffers, random states.

    The script saves with a CheckpointManager, or with save of dcp_all or dcp_core on all ranks, and resumes by itself
    when it is started again. With --world-sizes 2,1 it is started on 2 ranks as by torchrun, and resumed on 2 and on 1.
    It runs in a temporary directory with links to the contents of the working directory, except for directories that
    have checkpoints. If it writes to another path, pass that path as an argument with {root}, an empty directory.

    The exit code is 0 if the runs are equal, 1 if they differ or the script is not deterministic, 4 if it fails.
    """
    try:
        report = prove_script(
            script,
            arguments,
            kill_at_save=kill_at_save,
            world_sizes=world_sizes,
            tolerance=tolerance,
            ignore=ignore,
            folder=keep,
            timeout_seconds=timeout_seconds,
        )
    except DcpError as error:
        problem, _, output = str(error).partition("\n")
        if output:  # as the script printed it: the error of a command is one line
            click.echo(output, err=True)
        raise DcpError(problem) from error
    click.echo(json.dumps(report.as_dict(), indent=2) if as_json else str(report))
    return 0 if report.ok else 1
