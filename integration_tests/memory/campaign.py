"""Faults of jobs whose checkpoints lie in the memory of their hosts: each is followed by a resumption.

`python -m integration_tests.memory.campaign FAULTS NEAR:NUMBER …` lives through stories of so many faults each; NEAR is
what the near tier is (`folder`, `keeper` or `partner`), NUMBER is what the story is drawn from. A line of JSON says
what came of each; the exit status is 1 if something was not as it must be. Ranks are forked from this process, which
has imported everything. With DCP_CAMPAIGN_TRACE in the environment, each life is shown.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dcp_all as dcp
from dcp_memory import stop_keeper
from dcp_tiers import Tier, Tiers
from dcp_tiers.promote import promote
from integration_tests.hosts.pretended import without_promoter
from integration_tests.memory.faults import Story, draw_story
from integration_tests.memory.hosts import RUN, Hosts, kill, processes_of
from integration_tests.memory.jobs import Job
from integration_tests.memory.lives import state_of
from integration_tests.memory.watching import adopt_orphans

__all__ = ["main"]

_END_SECONDS = 30.0


def run_story(story: Story) -> dict[str, Any]:
    """Live through a story in a folder of its own, and look at what it leaves; returns what came of it."""
    begun = time.monotonic()
    root = Path(tempfile.mkdtemp(prefix="dcp-m-"))
    job = Job(story, root)
    try:
        job.run()
        job.problems += [f"story {story.number}: {left}" for left in end(job.hosts)]
    finally:
        kill(processes_of(root))
        shutil.rmtree(root)
    return {
        "story": story.number,
        "layout": [len(story.layout.hosts), story.layout.each],
        "faults": len(story.faults),
        "counts": dict(sorted(job.counts.items())),
        "problems": job.problems,
        "seconds": round(time.monotonic() - begun, 1),
    }


def end(hosts: Hosts) -> list[str]:
    """Stop the keepers, and return what is left that must not be.

    A rank that was killed may have begun to start a keeper, which answers later: they are stopped until none is left.
    """
    left, until = [], time.monotonic() + _END_SECONDS
    while True:
        if hosts.near != "folder":
            for name in hosts.names():
                with hosts.on(name):
                    stop_keeper(RUN)
        found = processes_of(hosts.root)
        if not found or time.monotonic() > until:
            break
        time.sleep(0.1)
    for pid in found:
        with contextlib.suppress(FileNotFoundError):
            left.append(f"process {pid} is left: {Path(f'/proc/{pid}/cmdline').read_bytes()!r}")
    if hosts.near != "folder":
        left += [f"{path} is left" for path in (hosts.root / "hosts").rglob("*") if path.is_file() or path.is_socket()]
    return left + children_left()


def children_left() -> list[str]:
    """Return the children of this process, also those that it has adopted, that do not end within half a minute."""
    until = time.monotonic() + _END_SECONDS
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        if not children or time.monotonic() > until:
            return [f"process {pid} is left: {Path(f'/proc/{pid}/cmdline').read_bytes()!r}" for pid in children]
        time.sleep(0.02)


def warm_up() -> None:
    """Import what is imported late, so that ranks need not: a save and a load of a group of one, and a promotion."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        near, far = Path(folder, "near"), Path(folder, "far")
        tiers = Tiers([Tier(near), Tier(far)])
        with without_promoter(), dcp.AsyncSaver("thread") as saver:
            with dcp.CheckpointManager(tiers, saver=saver) as manager:
                manager.save(1, state_of(1, 0))
            with dcp.CheckpointManager(tiers) as manager:
                manager.restore(state_of(0, 0))
                manager.save(2, state_of(2, 0))
        promote(tiers)
        dist.destroy_process_group()
    gc.collect()
    gc.freeze()


def main(faults: str, *stories: str) -> int:
    """Live through stories, and print what came of them."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # of connections to ranks that were killed
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    adopt_orphans()
    warm_up()
    failed = 0
    for story in stories:
        near, _, number = story.partition(":")
        told = run_story(draw_story(int(number), near, faults=int(faults)))
        failed += len(told["problems"])
        print(json.dumps(told), flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
