from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchtitan", reason="needs torchtitan: nox -s frameworks")

from torchtitan.components.checkpointer import CheckpointManager

import dcp_all as dcp
from dcp_core import CheckpointNotFoundError, LoadMismatchError
from dcp_torchtitan import DcpCheckpointManager

# torchtitan's own manager, in a process without a group.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
MODES = ["disabled", "async", "async_with_pinned_mem"]


def set_to(manager: Any, value: float) -> None:
    """Let the state be that of a step."""
    with torch.no_grad():
        for parameter in manager.states["model"].model[0].parameters():
            parameter.fill_(value)
    manager.states["optimizer"].value.fill_(value)
    manager.states["lr_scheduler"].value = value
    manager.states["train_state"].value = int(value)


def values_of(manager: Any) -> dict[str, Any]:
    """What the state is, each kind by one number."""
    model = manager.states["model"].model[0]
    assert torch.equal(model.weight, torch.full((2, 3), model.bias[0].item()))
    found = {name: manager.states[name].value for name in ("lr_scheduler", "train_state", "dataloader")}
    return found | {"model": model.bias[0].item(), "optimizer": manager.states["optimizer"].value[0].item()}


def all_at(value: float) -> dict[str, Any]:
    return {
        "lr_scheduler": value, "train_state": int(value), "dataloader": "data", "model": value, "optimizer": value
    }  # fmt: skip


def train(manager: Any, first: int, last: int, *, ends: bool = False) -> list[int]:
    """As the trainer does; returns the steps that were saved."""
    saved = []
    for step in range(first, last + 1):
        manager.maybe_wait_for_staging()  # before the optimizer's step
        set_to(manager, step)
        if manager.save(step, last_step=ends and step == last):
            saved.append(step)
    manager.maybe_wait_for_saving()
    return saved


def folders(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "checkpoint").glob("step-*"))


@pytest.mark.parametrize("mode", MODES)
def test_what_is_saved_comes_back(make_manager: Any, mode: str) -> None:
    manager = make_manager(DcpCheckpointManager, async_mode=mode)
    assert train(manager, 1, 5) == [1, 2, 3, 4, 5]
    set_to(manager, 99)
    assert manager.load()
    assert values_of(manager) == all_at(5)
    assert manager.load(step=2)
    assert values_of(manager) == all_at(2)
    manager.close()
    manager.close()


@pytest.mark.parametrize("mode", MODES)
def test_the_latest_k_stay(make_manager: Any, tmp_path: Path, mode: str) -> None:
    manager = make_manager(DcpCheckpointManager, async_mode=mode, keep_latest_k=2)
    train(manager, 1, 5)
    manager.close()
    assert folders(tmp_path) == ["step-4", "step-5"]


@pytest.mark.parametrize(
    ("saves", "loads"), [(CheckpointManager, DcpCheckpointManager), (DcpCheckpointManager, CheckpointManager)]
)
def test_either_loads_what_the_other_has_saved(make_manager: Any, saves: Any, loads: Any) -> None:
    manager = make_manager(saves, interval=2)
    assert train(manager, 1, 5) == [2, 4]
    manager.close()
    other = make_manager(loads)
    assert other.load()
    assert values_of(other) == all_at(4)
    other.close()


def test_steps_that_are_saved(make_manager: Any) -> None:
    options = {"interval": 3, "last_save_model_only": False}
    assert train(make_manager(DcpCheckpointManager, **options), 1, 8, ends=True) == [3, 6, 8]
    options |= {"enable_first_step_checkpoint": True, "folder": "other"}
    assert train(make_manager(DcpCheckpointManager, **options), 1, 4) == [1, 3]
    assert train(make_manager(DcpCheckpointManager, load_only=True, folder="none"), 1, 4, ends=True) == []


def test_one_that_is_not_enabled_does_nothing(make_manager: Any, tmp_path: Path) -> None:
    manager = make_manager(DcpCheckpointManager, enable=False)
    assert not manager.load()
    assert not manager.save(1)
    assert not manager.save(2, last_step=True)
    manager.maybe_wait_for_staging()
    manager.maybe_wait_for_saving()
    manager.close()
    assert not (tmp_path / "checkpoint").exists()


def test_a_fresh_start_loads_nothing(make_manager: Any) -> None:
    manager = make_manager(DcpCheckpointManager, value=7)
    assert not manager.load()
    assert values_of(manager) == all_at(7)


def test_a_step_that_is_not_there_is_named(make_manager: Any) -> None:
    manager = make_manager(DcpCheckpointManager)
    train(manager, 1, 2)
    with pytest.raises(CheckpointNotFoundError, match=r"load_step=9 .* has the steps \[1, 2\]"):
        manager.load(step=9)


@pytest.mark.parametrize("saves", [CheckpointManager, DcpCheckpointManager])
def test_a_damaged_checkpoint_is_passed_over(make_manager: Any, tmp_path: Path, saves: Any) -> None:
    train(make_manager(saves), 1, 3)
    (data,) = (tmp_path / "checkpoint" / "step-3").glob("*.distcp")
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    manager = make_manager(DcpCheckpointManager)
    assert manager.load()
    assert values_of(manager) == all_at(2)


def test_none_of_several_that_loads_is_no_fresh_start(make_manager: Any, tmp_path: Path) -> None:
    train(make_manager(DcpCheckpointManager), 1, 2)
    for data in (tmp_path / "checkpoint").glob("step-*/*.distcp"):
        data.unlink()
    for _ in range(2):  # the second time they are known to be damaged
        with pytest.raises(CheckpointNotFoundError, match="none of the checkpoints"):
            make_manager(DcpCheckpointManager).load()


def test_excluded_states_stay_as_they_are(make_manager: Any) -> None:
    train(make_manager(DcpCheckpointManager), 1, 3)
    manager = make_manager(DcpCheckpointManager, value=9, exclude_from_loading=["optimizer", "train_state"])
    assert manager.load()
    assert values_of(manager) == all_at(3) | {"optimizer": 9, "train_state": 9}


def test_an_excluded_state_that_does_not_exist_is_named(make_manager: Any) -> None:
    train(make_manager(DcpCheckpointManager), 1, 1)
    with pytest.raises(ValueError, match=r"no state optimiser; there are dataloader, lr_scheduler, optimizer"):
        make_manager(DcpCheckpointManager, exclude_from_loading=["optimiser"]).load()


def test_the_last_step_can_be_the_model_alone_in_another_dtype(make_manager: Any, tmp_path: Path) -> None:
    manager = make_manager(DcpCheckpointManager, export_dtype="bfloat16", async_mode="async")
    train(manager, 1, 3, ends=True)
    manager.close()
    last = dcp.load_keys(checkpoint_id=tmp_path / "checkpoint" / "step-3")
    assert {name: value.dtype for name, value in last.items()} == {"weight": torch.bfloat16, "bias": torch.bfloat16}
    assert "optimizer" in dcp.load_keys(checkpoint_id=tmp_path / "checkpoint" / "step-2")
    with pytest.raises(LoadMismatchError, match="optimizer"):
        make_manager(DcpCheckpointManager).load()


@pytest.mark.parametrize("saves", [CheckpointManager, DcpCheckpointManager])
def test_a_seed_checkpoint_is_the_model_alone(make_manager: Any, saves: Any) -> None:
    seed = make_manager(saves, value=4, create_seed_checkpoint=True)
    assert seed.save(0, last_step=True)
    manager = make_manager(DcpCheckpointManager)
    assert manager.load()
    assert values_of(manager) == all_at(0) | {"model": 4}


@pytest.mark.parametrize("model_only", [True, False])
def test_a_run_begins_with_the_initial_checkpoint_until_it_has_its_own(
    make_manager: Any, tmp_path: Path, model_only: bool
) -> None:
    train(make_manager(CheckpointManager, folder="before"), 1, 2)
    options = {"initial_load_path": str(tmp_path / "before" / "step-2"), "initial_load_model_only": model_only}
    manager = make_manager(DcpCheckpointManager, **options)
    assert manager.load()
    assert values_of(manager) == (all_at(0) | {"model": 2} if model_only else all_at(2))
    train(manager, 5, 6)
    assert manager.load()
    assert values_of(manager) == all_at(6)


def test_an_initial_checkpoint_that_does_not_exist_is_named(make_manager: Any, tmp_path: Path) -> None:
    manager = make_manager(DcpCheckpointManager, initial_load_path=str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointNotFoundError, match="nowhere"):
        manager.load()


def test_saves_that_fail_are_tolerated_as_often_as_is_said(
    make_manager: Any, fill_disk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make_manager(DcpCheckpointManager, tolerated_failures=1)
    train(manager, 1, 1)
    fill_disk()
    assert not manager.save(2)
    with pytest.raises(OSError, match="No space"):
        manager.save(3)
    monkeypatch.undo()
    assert manager.load()
    assert values_of(manager) == all_at(1)


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="tolerated_failures"):
        DcpCheckpointManager.Config(tolerated_failures=-1)
    with pytest.raises(ValueError, match="keep_latest_k"):
        DcpCheckpointManager.Config(keep_latest_k=-1)
    with pytest.raises(ValueError, match="async_mode"):
        DcpCheckpointManager.Config(async_mode="now and then")


@pytest.fixture
def fails_in_background(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the disk be full for threads."""
    from dcp_io.stores import local_store

    write = local_store.write_fully

    def refuse(*arguments: Any) -> int:
        if threading.current_thread() is not threading.main_thread():
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*arguments)

    monkeypatch.setattr(local_store, "write_fully", refuse)


@pytest.mark.usefixtures("fails_in_background")
def test_closing_while_an_error_is_handled_hides_nothing(make_manager: Any) -> None:
    manager = make_manager(DcpCheckpointManager, async_mode="async")
    assert manager.save(1)
    try:
        float("of the training")
    except ValueError:
        manager.close()  # as the trainer does


@pytest.mark.usefixtures("fails_in_background")
@pytest.mark.parametrize("asks", ["maybe_wait_for_saving", "close"])
def test_a_save_that_has_failed_is_raised_by_whoever_asks(make_manager: Any, asks: str) -> None:
    manager = make_manager(DcpCheckpointManager, async_mode="async")
    assert manager.save(1)
    with pytest.raises(OSError, match="No space"):
        getattr(manager, asks)()
    manager.close()
