"""Processes of the ranks of one run."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dcp_core import DcpError
from dcp_prove.observing.records import RunRecord, read_record

RUN_TIMEOUT_SECONDS = 600.0
_GRACE_SECONDS = 10.0
_SHOWN_BYTES = 4_000
# Not `python -m`, which would search the working directory for every module first.
_PROGRAM = (
    "import sys; from dcp_prove.processes import end_with_parent; end_with_parent(); "
    "from {} import {} as run; run(sys.argv[1])"
)


@contextlib.contextmanager
def proof_folder(folder: str | None) -> Iterator[Path]:
    """Yield the directory of a proof; by default a temporary one, which is then removed."""
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        yield Path(folder).resolve()
        return
    with tempfile.TemporaryDirectory(prefix="dcp-prove-", ignore_cleanup_errors=True) as made:
        yield Path(made).resolve()


def make_folders(folder: Path, names: Sequence[str], killed: Path | None) -> None:
    """Make a run's directory anew, with empty directories, or for a resume with copies of the killed run's."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in names:
        if killed is None:
            (folder / name).mkdir(parents=True)
        else:
            shutil.copytree(killed / name, folder / name, symlinks=True)


def run_recorded(
    program: str,
    job: Mapping[str, Any],
    world_size: int,
    folder: Path,
    *,
    what: str,
    killed: bool,
    timeout_seconds: float,
    working_folder: Path | None = None,
) -> list[RunRecord]:
    """Run the function `module:name` of a job as ranks (see `run_ranks`), and return their records."""
    text = json.dumps({**job, "records": str(folder)})
    command = [sys.executable, "-c", _PROGRAM.format(*program.split(":")), text]
    run_ranks(
        command,
        world_size,
        folder,
        what=what,
        killed=killed,
        timeout_seconds=timeout_seconds,
        working_folder=working_folder,
    )
    return [read_record(folder / f"rank{rank}.jsonl") for rank in range(world_size)]


def run_ranks(
    command: Sequence[str],
    world_size: int,
    folder: Path,
    *,
    what: str,
    killed: bool = False,
    timeout_seconds: float,
    working_folder: Path | None = None,
) -> None:
    """Run a command as the ranks of one job on this machine, and wait for them.

    The ranks get the environment variables of `torchrun`; `folder` gets their output. With `killed`, they must end by
    SIGKILL. Raises DcpError, with the end of its output, if a rank ended otherwise.
    """
    store = launcher_store()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world_size):
            with (folder / f"rank{rank}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.PIPE,  # which `end_with_parent` watches
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        cwd=working_folder,
                        env={**os.environ, **launcher_environment(rank, world_size, store.port)},
                        start_new_session=True,
                    )
                )
        _wait(processes, folder, what=what, killed=killed, timeout_seconds=timeout_seconds)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):  # including its data workers
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdin is not None:
                process.stdin.close()


def end_with_parent() -> None:
    """End this process with its parent; called at the start of a rank."""
    pipe = os.dup(0)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)

    def watch() -> None:
        os.read(pipe, 1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _wait(
    processes: Sequence[subprocess.Popen[bytes]], folder: Path, *, what: str, killed: bool, timeout_seconds: float
) -> None:
    wanted = -signal.SIGKILL if killed else 0
    deadline = time.monotonic() + timeout_seconds
    late = False
    while any(process.poll() is None for process in processes):
        wrong = [process for process in processes if process.poll() not in (None, wanted)]
        if wrong:
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        late = time.monotonic() > deadline
        if late:
            break
        time.sleep(0.02)
    codes = {rank: process.poll() for rank, process in enumerate(processes)}
    failed = sorted((rank for rank, code in codes.items() if code != wanted), key=lambda rank: codes[rank] is None)
    if not failed:
        return
    rank = failed[0]
    code = codes[rank]
    if code is None:
        how = f"was still running after {timeout_seconds:g} s (timeout_seconds)"
    elif code == 0:
        how = "ended by itself before the save after which it was to be killed"
    else:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    raise DcpError(f"{what}: rank {rank} of {len(processes)} {how}\n{_tail(folder / f'rank{rank}.log')}")


def launcher_store() -> Any:
    """Return a store for the ranks of this machine; it ends with the object."""
    return dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, None, is_master=True, wait_for_workers=False
    )


def launcher_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the environment variables that `torchrun` gives to a rank."""
    kinds = ("", "LOCAL_", "ROLE_")
    found = {f"{kind}RANK": str(rank) for kind in kinds} | {f"{kind}WORLD_SIZE": str(world_size) for kind in kinds}
    found |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_NAME": "default"}
    found |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    # Frameworks detect a launcher by the run's id.
    found |= {"TORCHELASTIC_RUN_ID": "prove", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}
    if world_size > 1:
        found["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    if sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ:
        found["GLOO_SOCKET_IFNAME"] = "lo"
    return {**found, "PYTHONUNBUFFERED": "1"}


def _tail(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _SHOWN_BYTES))
        text = file.read().decode(errors="replace").strip()
    return text or "(no output)"
