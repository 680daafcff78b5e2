"""Section E: an error on some ranks reaches all of them, whatever it is made of, and nobody waits for a timeout.

E4 is about model state dicts, which have a package of their own.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import dcp_all as dcp
from integration_tests import failing
from integration_tests.kits.coordinators import every_failure_is_heard

WITHIN_SECONDS = 200.0  # of half an hour that ranks would wait otherwise; it takes a fraction of a second


class _Refusing:
    """A part of the state whose `state_dict` raises on some ranks, each of which says that it was that one."""

    def __init__(self, ranks: tuple[int, ...], error: type[Exception]) -> None:
        self.ranks = ranks
        self.error = error

    def state_dict(self) -> dict[str, Any]:
        if dist.get_rank() in self.ranks:
            raise self.error(f"refused by rank {dist.get_rank()}")
        return {"value": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing."""


def _tell(action: Any) -> tuple[list[int], str, float]:
    start = time.monotonic()
    try:
        action()
    except dcp.CheckpointException as error:
        return list(error.failures), str(error), time.monotonic() - start
    return [], "", time.monotonic() - start


def _save_refused(folder: str, ranks: tuple[int, ...], error: type[Exception]) -> tuple[list[int], str, float]:
    state = failing.state(1.0) | {"part": _Refusing(ranks, error)}
    with every_failure_is_heard():
        return _tell(lambda: dcp.save(state, checkpoint_id=folder))


@pytest.mark.parametrize("error", [ValueError, failing.UnpicklableError], ids=["e01", "e02"])
def test_e01_e02_failures_of_several_ranks_reach_all(ranks: Any, tmp_path: Path, error: type[Exception]) -> None:
    folder = tmp_path / "checkpoint"
    for failed, text, seconds in ranks.run(4, _save_refused, str(folder), (1, 3), error):
        assert failed == [1, 3]
        for rank in failed:
            assert f"{error.__name__}: refused by rank {rank}" in text
        assert seconds < WITHIN_SECONDS
    assert failing.listed(str(folder)) == []


class _Flaky(dcp.FileSystemReader):
    """Cannot read the index on some ranks."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() in (1, 3):
            raise OSError("the index cannot be read just now")
        return super().read_metadata(*args, **kwargs)


def _load_flaky(folder: str) -> tuple[tuple[list[int], str, float], bool]:
    dcp.save(failing.state(1.0), checkpoint_id=folder, use_collectives=False)
    dcp.save(failing.state(2.0), checkpoint_id=folder)
    with every_failure_is_heard():
        told = _tell(lambda: dcp.load(failing.state(0.0), storage_reader=_Flaky(folder)))
    template = failing.state(0.0)
    dcp.load(template, checkpoint_id=folder)
    return told, failing.loaded(2.0, template)


def test_e03_an_index_that_some_ranks_cannot_read_is_an_error_on_all(ranks: Any, tmp_path: Path) -> None:
    for (failed, text, seconds), loads in ranks.run(4, _load_flaky, str(tmp_path)):
        assert failed == [1, 3]
        assert "the index cannot be read just now" in text
        assert seconds < WITHIN_SECONDS
        assert loads
