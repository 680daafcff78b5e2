"""Checkpoints that the tests of this folder damage: made once on real ranks, copied for each test."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from integration_tests.robustness import states
from integration_tests.robustness.zygote import Zygote

Made = Callable[[str, int], Path]
KINDS = {
    "torch": {"layout": "torch"},
    "raw": {"layout": "raw"},
    "alone": {"layout": "raw", "interop": False},
    "rank-local": {"use_collectives": False},
}


def stock_save(folder: str, version: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch.distributed.checkpoint as stock

        stock.save(states.sharded(version), storage_writer=stock.FileSystemWriter(folder))


@pytest.fixture(scope="session")
def made(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """`made(kind, version)` is the folder of a checkpoint that two ranks saved. Never change it."""

    @lru_cache
    def make(kind: str, version: int) -> Path:
        folder = tmp_path_factory.mktemp(f"{kind}-{version}") / "checkpoint"
        if kind == "stock":
            ranks.run(2, stock_save, str(folder), version)
        else:
            ranks.run(2, _save, str(folder), version, KINDS[kind])
        return folder

    return make


@pytest.fixture
def fresh(made: Made, tmp_path: Path) -> Made:
    """`fresh(kind, version)` is a copy of such a checkpoint, to be damaged."""

    def copy(kind: str, version: int) -> Path:
        folder = tmp_path / f"{kind}-{version}"
        shutil.rmtree(folder, ignore_errors=True)
        return Path(shutil.copytree(made(kind, version), folder))

    return copy


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Forks ranks that may be killed at any call."""
    process = Zygote()
    yield process
    process.close()


def _save(folder: str, version: int, options: dict[str, Any]) -> None:
    states.save(folder, version, **options)
