"""500 faults of jobs whose checkpoints lie in the memory of hosts, each followed by a resumption; see `campaign`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from integration_tests.forking import WARNINGS
from integration_tests.memory.faults import KINDS, draw_story
from integration_tests.memory.moments import MOMENTS

ROOT = Path(__file__).resolve().parents[2]
STORIES = {"partner": 44, "keeper": 4, "folder": 2}
"""Near tier → number of stories; each has ten faults."""
FAULTS = 10
GATING = ["partner:35", "partner:39", "partner:6", "keeper:1", "folder:1"]


def live_through(stories: list[str], seconds: float, *, note: Any) -> None:
    """Live through stories in a process of their own, and check what came of them."""
    done = subprocess.run(
        [sys.executable, *WARNINGS, "-m", "integration_tests.memory.campaign", str(FAULTS), *stories],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [problem for one in found for problem in one["problems"]] == []
    assert done.returncode == 0, done.stderr[-5000:]
    assert len(found) == len(stories)
    counts: Counter[str] = sum((Counter(one["counts"]) for one in found), Counter())
    for name, count in sorted(counts.items()):
        note(name, count)
        print(f"{name}: {count}")
    assert sum(count for name, count in counts.items() if name.startswith("at the ")) == FAULTS * len(stories)


@pytest.mark.timeout(1800)
def test_a_tenth(record_property: Any) -> None:
    live_through(GATING, 1700, note=record_property)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(0, 50, 5))
def test_all(first: int, record_property: Any) -> None:
    stories = [f"{near}:{number}" for near, count in STORIES.items() for number in range(count)]
    live_through(stories[first : first + 5], 3000, note=record_property)


def test_all_kinds_of_faults_at_all_moments_are_drawn() -> None:
    stories = [draw_story(number, "partner", faults=FAULTS) for number in range(STORIES["partner"])]
    assert stories == [draw_story(number, "partner", faults=FAULTS) for number in range(STORIES["partner"])]
    faults = [fault for story in stories for fault in story.faults]
    assert {fault.kind for fault in faults} == {*KINDS}
    assert {fault.moment for fault in faults} == {"time", *MOMENTS}
    assert {"none", "thread", "process"} == {fault.saver for fault in faults}
    assert {(len(story.layout.hosts), story.layout.each) for story in stories} >= {(4, 2), (1, 1), (3, 1), (2, 2)}
