"""Restarts of real processes: what a keeper has kept is there for the next ranks, however the last ones ended."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dcp_memory import keeper_status, stop_keeper
from integration_tests.memory.hosts import is_alive, is_stopped, kill, processes_of

pytestmark = pytest.mark.slow  # each start of ranks imports PyTorch
EXAMPLE = Path(__file__).resolve().parents[2] / "docs/examples/elastic_memory.py"
RUN = "elastic-run"
BEGUN = re.compile(r"start (\d+) goes on from step (\d+)")
_SECONDS = 240.0
END = re.compile(r"step 60: the weights sum up to (\S+)")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the example, and a folder of keepers in it; nothing of them is left at the end."""
    keepers = tmp_path / "keepers"
    monkeypatch.setenv("DCP_KEEPER_DIR", str(keepers))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # else gloo may call killed ranks
    shutil.copy(EXAMPLE, tmp_path)
    yield tmp_path
    kill(processes_of(tmp_path))


def command(ranks: int, *more: str) -> list[str]:
    options = ["--nproc-per-node", str(ranks), "--max-restarts", "3", "--standalone"]
    return [sys.executable, "-m", "torch.distributed.run", *options, EXAMPLE.name, *more]


def train(place: Path, ranks: int, *more: str) -> tuple[list[tuple[int, int]], str]:
    """Run the example by torchrun; returns number and first step of each start, and the sum of the weights."""
    done = subprocess.run(
        command(ranks, *more), cwd=place, capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    (total,) = END.findall(done.stdout)
    return [(int(start), int(step)) for start, step in BEGUN.findall(done.stdout)], total


def kill_at(place: Path, step: int) -> None:
    """Run the example until a rank stops before a step, and kill the launcher and the ranks, but no keeper."""
    script = place / EXAMPLE.name
    script.write_text(script.read_text().replace("SIGKILL", "SIGSTOP"))
    with subprocess.Popen(command(2, "--crash-at", str(step)), cwd=place) as launcher:
        until = time.monotonic() + _SECONDS
        while not (ranks := stopped(place)) and time.monotonic() < until:
            time.sleep(0.05)
        assert ranks
        others = {pid for pid in processes_of(place) if EXAMPLE.name.encode() in words_of(pid)}
        launcher.kill()
        kill([*others])
    shutil.copy(EXAMPLE, place)


def stopped(place: Path) -> list[int]:
    """The ranks that have stopped."""
    return [pid for pid in processes_of(place) if is_stopped(pid)]


def words_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def steps_in(tier: Path) -> set[str]:
    return {path.parent.name for path in tier.glob("step-*/.metadata")}


def test_torchruns_restart_goes_on_from_memory(place: Path) -> None:
    starts, total = train(place, 2, "--crash-at", "35")
    # The save of step 30, in the background, may not have ended. The slow tier never had either: all came from memory.
    assert starts in ([(1, 0), (2, 30)], [(1, 0), (2, 20)])
    assert steps_in(place / "slow") <= {"step-40"}
    status = keeper_status(RUN)
    assert status is not None
    assert status.lent_bytes == 0
    assert stop_keeper(RUN)
    assert not is_alive(status.pid)
    assert [*(place / "keepers").iterdir()] == []
    shutil.rmtree(place / "slow")
    assert train(place, 2) == ([(1, 0)], total)
    stop_keeper(RUN)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_job_that_was_killed_is_started_again(place: Path, ranks: int) -> None:
    """All processes of the job are killed, its launcher first; the next one has the same or another world size."""
    kill_at(place, 35)
    status = keeper_status(RUN)
    assert status is not None
    assert is_alive(status.pid)
    assert train(place, ranks)[0] in ([(1, 30)], [(1, 20)])
    stop_keeper(RUN)


def test_without_its_keeper_it_goes_on_from_the_slow_tier(place: Path) -> None:
    kill_at(place, 55)
    status = keeper_status(RUN)
    assert status is not None
    until = time.monotonic() + _SECONDS
    while steps_in(place / "slow") != {"step-40"} and time.monotonic() < until:  # promoters outlive trainers
        time.sleep(0.05)
    kill([status.pid])
    assert train(place, 2)[0] == [(1, 40)]
    stop_keeper(RUN)
