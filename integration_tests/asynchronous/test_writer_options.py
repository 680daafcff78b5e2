"""Every option of a storage writer with every saver: a row for each, compared with what was saved."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_all as dcp
from dcp_core.testing.trees import same
from dcp_fsspec import FsspecWriter
from dcp_ranks.testing.ranks import RankPool
from dcp_transforms import BlockZStandard, FloatPlanes, ZStandard

STATE: dict[str, Any] = {
    "weights": torch.linspace(-1, 1, 5000),
    "half": torch.linspace(-1, 1, 3000).bfloat16(),
    "tokens": torch.arange(4000) % 7,
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(1.5),
    "step": 7,
    "nested": {"list": [1, {"x": torch.ones(2)}], "name": "a"},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "auto": {"compression": "auto"},
    "planes": {"compression": "planes"},
    "zstd": {"compression": "zstd"},
    "none": {"compression": "none"},
    "a transform of planes": {"compression": FloatPlanes()},
    "a transform of blocks": {"compression": BlockZStandard(5)},
    "a transform of streams": {"compression": ZStandard(1, threads=1)},
    "a chain": {"compression": [BlockZStandard(), FloatPlanes()]},
    "by dtype and name": {"compression": {torch.float32: "planes", "tok*": "block.zstd/1", "*": "zstd"}},
    "extensions": {"_extensions": [ZStandard()]},
    "raw": {"layout": "raw"},
    "raw and auto": {"layout": "raw", "compression": "auto"},
    "for us alone": {"interop": False},
    "a file for each item": {"single_file_per_rank": False},
    "not flushed": {"sync_files": False},
    "threads": {"thread_count": 3},
    "memory": {"max_inflight_bytes": 1 << 20, "per_thread_copy_ahead": 1000},
    "stale": {"stale_after_seconds": 5.0},
    "stock's cache": {"cache_staged_state_dict": True},
    "not over an old one": {"overwrite": False},
}
SMALL: list[dict[str, Any]] = [
    {},
    {"step": 7},
    {"empty": torch.empty(0)},
    {"nothing": {}, "deep": {"none": None}},
    {"one": torch.tensor(True)},
]


@pytest.fixture(scope="module", params=["thread", "process"])
def saver(request: pytest.FixtureRequest) -> Iterator[dcp.AsyncSaver]:
    with dcp.AsyncSaver(request.param) as made:
        yield made


def _saved(saver: dcp.AsyncSaver, state: dict[str, Any], writer: Any) -> None:
    answer = saver.save(state, storage_writer=writer)
    future = answer if isinstance(answer, Future) else answer.upload_completion
    assert future.result().state_dict_metadata is not None


@pytest.mark.parametrize("storage", [dcp.FileSystemWriter, FsspecWriter])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_each_option(saver: dcp.AsyncSaver, storage: Any, options: dict[str, Any], tmp_path: Path) -> None:
    if storage is FsspecWriter and "cache_staged_state_dict" in options:
        options = {}
    place = tmp_path / "step"
    _saved(saver, STATE, storage(str(place), **options))
    assert same(dcp.load_keys(checkpoint_id=place), STATE)


@pytest.mark.parametrize("state", SMALL, ids=range(len(SMALL)))
def test_states_without_bytes(saver: dcp.AsyncSaver, state: dict[str, Any], tmp_path: Path) -> None:
    for options in ({}, {"compression": "auto"}, {"layout": "raw"}):
        _saved(saver, state, dcp.FileSystemWriter(tmp_path / "step", **options))
        found = dcp.load_keys(checkpoint_id=tmp_path / "step")
        assert same(found, state) or not any(isinstance(value, dict) for value in found.values())


def _scalars_on_one_rank(root: str, kind: str) -> list[str]:
    rank = torch.distributed.get_rank()
    state: dict[str, Any] = {"step": 3} if rank else {"step": 3, "w": torch.ones(5)}
    with dcp.AsyncSaver(kind) as saver:
        for number in range(2):
            future: Any = saver.save(state, checkpoint_id=f"{root}/{kind}{number}")
            future.result()
    return sorted(dcp.load_keys(checkpoint_id=f"{root}/{kind}1", no_dist=True))


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_ranks_that_hold_only_scalars(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    assert ranks.run(2, _scalars_on_one_rank, str(tmp_path), kind) == [["step", "w"]] * 2
