"""Calls into stateful values are made in one order on all ranks, whatever the order of each rank's own dict.

They may be collective: in each rank's own order they would wait for one another for ever. The values here only note
when they were called, so that a wrong order is an assertion and no hang.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp_all as dcp

NAMES = ("model", "optimizer", "Loader", "10", "9", "ö", "a.b")
CALLS: list[tuple[str, str]] = []


class Part:
    """A stateful value that notes its calls."""

    def __init__(self, name: str) -> None:
        self.name = name

    def state_dict(self) -> dict[str, Any]:
        CALLS.append(("state_dict", self.name))
        return {"value": torch.ones(2)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        del state_dict
        CALLS.append(("load_state_dict", self.name))


def parts() -> dict[str, Any]:
    """The same values on every rank, each rank with an order of its own, nested ones included."""
    state: dict[str, Any] = {name: Part(name) for name in NAMES}
    state["own"] = dcp.PerRank(Part("own"))
    state["nested"] = shuffled({f"inner {name}": dcp.PerRank(Part(f"inner {name}")) for name in NAMES})
    return shuffled(state)


def shuffled(state: dict[str, Any]) -> dict[str, Any]:
    names = [*state]
    random.Random(dist.get_rank() + len(names)).shuffle(names)
    return {name: state[name] for name in names}


def save(folder: str) -> None:
    dcp.save(parts(), checkpoint_id=folder)


def save_alone(folder: str) -> None:
    dcp.save(parts(), checkpoint_id=folder, use_collectives=False)


def save_in_thread(folder: str) -> None:
    future: Any = dcp.async_save(parts(), checkpoint_id=folder)
    future.result()


def save_and_load(folder: str) -> None:
    state = parts()
    dcp.save(state, checkpoint_id=folder)
    dcp.load(state, checkpoint_id=folder)


def save_and_load_by_deprecated_names(folder: str) -> None:
    with pytest.warns(FutureWarning):
        dcp.save_state_dict(parts(), dcp.FileSystemWriter(folder))
    with pytest.warns(FutureWarning):
        dcp.load_state_dict(parts(), dcp.FileSystemReader(folder))


def application(folder: str) -> None:
    def made() -> Any:
        values = shuffled({name: Part(name) for name in ("zeta", "alpha", "Mu", "nu")})
        return dcp.app_state(torch.nn.Linear(2, 2), **values)

    dcp.save({"app": made()}, checkpoint_id=folder)
    dcp.load({"app": made()}, checkpoint_id=folder)


def manager(folder: str) -> None:
    with dcp.CheckpointManager(folder) as made:
        made.save(1, parts())
        made.restore(parts())


WAYS: dict[str, tuple[Callable[[str], None], int]] = {
    "save": (save, 15),
    "without collectives": (save_alone, 15),
    "async_save": (save_in_thread, 15),
    "load": (save_and_load, 45),
    "deprecated names": (save_and_load_by_deprecated_names, 45),
    "app_state": (application, 12),
    "manager": (manager, 45),
}


def calls_of(way: str, folder: str) -> list[tuple[str, str]]:
    CALLS.clear()
    WAYS[way][0](folder)
    return [*CALLS]


@pytest.mark.parametrize("way", WAYS)
def test_stateful_values_are_called_in_one_order(ranks: Any, tmp_path: Path, way: str) -> None:
    first, second = ranks.run(2, calls_of, way, str(tmp_path / "checkpoint"))
    assert len(first) == WAYS[way][1]
    assert first == second
