"""Arguments of the wrong kind are refused by the constructor or the call, with the remedy. Nothing is written."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from dcp_manager import CheckpointManager, EverySteps, KeepBest, KeepLast, OnRequest


@pytest.mark.parametrize(
    ("argument", "remedy"),
    [
        ({"save_policy": 10}, r"EverySteps\(1000\)"),
        ({"save_policy": EverySteps}, r"EverySteps\(1000\)"),
        ({"save_policy": KeepLast(3)}, "belong to keep_policy"),
        ({"keep_policy": 3}, r"KeepLast\(3\)"),
        ({"keep_policy": EverySteps(3)}, "belong to save_policy"),
        ({"saver": "process"}, r"AsyncSaver\('process'\)"),
        ({"saver": 5}, r"AsyncSaver\('process'\)"),
        ({"tolerated_failures": -1}, "whole number"),
        ({"tolerated_failures": "3"}, "whole number"),
        ({"preemption_timeout_seconds": "25"}, "preemption_timeout_seconds"),
        ({"close_timeout_seconds": -1}, "close_timeout_seconds"),
        ({"timeout_seconds": math.nan}, "timeout_seconds"),
    ],
    ids=str,
)
def test_the_constructor_refuses(tmp_path: Path, argument: dict[str, Any], remedy: str) -> None:
    with pytest.raises((TypeError, ValueError), match=remedy):
        CheckpointManager(tmp_path / "run", **argument)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("step", ["2", 2.0, -1, None, True])
@pytest.mark.parametrize("call", ["save", "maybe_save"])
def test_a_step_is_a_whole_number(tmp_path: Path, call: str, step: Any) -> None:
    with CheckpointManager(tmp_path, save_policy=EverySteps(1000)) as manager:
        with pytest.raises(ValueError, match="whole number"):
            getattr(manager, call)(step, {})
        assert manager.checkpoints() == []


def test_policies_are_joined_with_policies_of_their_kind() -> None:
    for one, other in ((EverySteps(1), KeepLast(1)), (KeepLast(1), OnRequest()), (KeepBest(1, "a"), 5)):
        with pytest.raises(TypeError, match="unsupported operand"):
            one | other  # type: ignore[operator]
