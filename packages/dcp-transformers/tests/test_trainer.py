"""One process: a Trainer that is interrupted and resumed is the one that was not; what stays, and what is refused."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from dcp_core import load_keys, save
from dcp_core.errors import CheckpointNotFoundError, UnsupportedFormatError
from dcp_manager import KeepLast
from dcp_transformers import manage_checkpoints

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")

Make = Callable[..., Any]


def losses(trainer: Any) -> list[tuple[float, ...]]:
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return [(log["step"], log["epoch"], log["loss"], log["grad_norm"], log["learning_rate"]) for log in logs]


def same(one: Any, other: Any) -> bool:
    pairs = zip(one.model.state_dict().items(), other.model.state_dict().items(), strict=True)
    moments = zip(one.optimizer.state.values(), other.optimizer.state.values(), strict=True)
    return all(name == again and torch.equal(a, b) for (name, a), (again, b) in pairs) and all(
        torch.equal(a[name], b[name]) for a, b in moments for name in a
    )


def interrupt(
    make_trainer: Make, folder: str, stop: int, *, manage: dict[str, Any] | None = None, **arguments: Any
) -> None:
    trainer = make_trainer(folder, stop=stop, **arguments)
    manage_checkpoints(trainer, **(manage or {}))
    with pytest.raises(InterruptedError):
        trainer.train()


def resume(
    make_trainer: Make, folder: str, place: Any = True, *, manage: dict[str, Any] | None = None, **arguments: Any
) -> Any:
    torch.manual_seed(77)  # nothing may depend on it
    trainer = make_trainer(folder, **arguments)
    manage_checkpoints(trainer, **(manage or {}))
    trainer.train(resume_from_checkpoint=place)
    return trainer


@pytest.mark.parametrize(
    ("stop", "manage", "arguments"),
    [
        pytest.param(6, {}, {}, id="in the first epoch"),
        pytest.param(13, {"saver": "thread"}, {}, id="in the second epoch, by a thread"),
        pytest.param(6, {"saver": "process"}, {}, id="by a process"),
        pytest.param(7, {}, {"gradient_accumulation_steps": 2, "save_steps": 3}, id="accumulation"),
        pytest.param(12, {}, {"save_strategy": "epoch"}, id="at the end of an epoch"),
        pytest.param(
            13, {}, {"train_sampling_strategy": "group_by_length", "save_steps": 6}, id="an order drawn by the epoch"
        ),
    ],
)
def test_resumed_is_uninterrupted(
    make_trainer: Make, stop: int, manage: dict[str, Any], arguments: dict[str, Any]
) -> None:
    whole = make_trainer(
        "whole",
        **arguments,
    )
    whole.args.save_strategy = "no"
    whole.train()
    interrupt(make_trainer, "run", stop, manage=manage, **arguments)
    resumed = resume(make_trainer, "run", manage=manage, **arguments)
    assert losses(resumed) == losses(whole)
    assert same(resumed, whole)


def test_order_drawn_by_the_epoch_survives_two_interruptions(make_trainer: Make) -> None:
    arguments = {"train_sampling_strategy": "group_by_length", "save_steps": 3}
    whole = make_trainer("whole", **arguments)
    whole.train()
    interrupt(make_trainer, "run", 5, **arguments)
    again = make_trainer("run", stop=8, **arguments)
    manage_checkpoints(again)
    with pytest.raises(InterruptedError):
        again.train(resume_from_checkpoint=True)
    assert losses(resume(make_trainer, "run", **arguments)) == losses(whole)


def test_the_trainer_writes_nothing_beside(make_trainer: Make, tmp_path: Path) -> None:
    trainer = make_trainer("run", max_steps=4)
    manage_checkpoints(trainer)
    trainer.train()
    names = {path.name for path in (tmp_path / "run" / "checkpoint-4").iterdir()}
    assert {name for name in names if not name.startswith(".") and not name.endswith(".distcp")} == set()
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"checkpoint-4", "latest"}
    assert not {"_save_checkpoint", "_load_rng_state"} & set(vars(trainer))


@pytest.mark.parametrize("keep", [2, KeepLast(2), None])
def test_as_many_stay_as_wanted(make_trainer: Make, tmp_path: Path, keep: Any) -> None:
    trainer = make_trainer("run", max_steps=8, save_steps=2, save_total_limit=3 if keep is None else 1)
    checkpoints = manage_checkpoints(trainer, keep=keep)
    trainer.train()
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*")) == [
        f"checkpoint-{step}" for step in ((4, 6, 8) if keep is None else (6, 8))
    ]
    assert checkpoints.latest() == 8


@pytest.mark.parametrize("root", ["folder", "uri"])
def test_the_best_one_stays_and_is_loaded_at_the_end(
    make_trainer: Make, tmp_path: Path, root: str, caplog: pytest.LogCaptureFixture
) -> None:
    place = None if root == "folder" else f"file://{tmp_path}/elsewhere"
    best: dict[int, Any] = {}

    class Worse:
        """Evaluations that say that step 4 was the best."""

        def __init__(self, trainer: Any) -> None:
            self.trainer, self.evaluate = trainer, trainer.evaluate

        def __call__(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            step = self.trainer.state.global_step
            best[step] = {name: value.clone() for name, value in self.trainer.model.state_dict().items()}
            return {"eval_loss": abs(step - 4.0)}

    arguments = {
        "max_steps": 10, "save_steps": 2, "eval_steps": 2, "eval_strategy": "steps", "load_best_model_at_end": True,
    }  # fmt: skip
    trainer = make_trainer("run", stop=9, **arguments)
    trainer.evaluate = Worse(trainer)
    manage_checkpoints(trainer, place, keep=1, saver="thread")
    with pytest.raises(InterruptedError):
        trainer.train()
    trainer = make_trainer("run", **arguments)
    trainer.evaluate = Worse(trainer)
    manage_checkpoints(trainer, place, keep=1, saver="thread")
    trainer.train(resume_from_checkpoint=True)
    assert "does not exist anymore" not in caplog.text
    kept = tmp_path / ("run" if root == "folder" else "elsewhere")
    assert sorted(path.name for path in kept.glob("checkpoint-*")) == ["checkpoint-10", "checkpoint-4"]
    assert all(torch.equal(value, best[4][name]) for name, value in trainer.model.state_dict().items())
    assert not torch.equal(best[4]["lm_head.weight"], best[10]["lm_head.weight"])


def test_a_damaged_one_is_passed_over(make_trainer: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = make_trainer("whole")
    whole.train()
    interrupt(make_trainer, "run", 13)
    data = max((tmp_path / "run" / "checkpoint-12").glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    middle = content.index(bytes(resumable_bytes(tmp_path / "run" / "checkpoint-12")))
    content[middle] ^= 1
    data.write_bytes(content)
    resumed = resume(make_trainer, "run")
    assert "step 12 is damaged and quarantined" in caplog.text
    assert losses(resumed) == losses(whole)
    assert same(resumed, whole)


def resumable_bytes(checkpoint: Path) -> bytes:
    """Bytes of a moment of the optimizer, which is loaded late."""
    state = load_keys("app.optimizer.state", checkpoint_id=str(checkpoint), no_dist=True)
    moment = state["app"]["optimizer"]["state"]["transformer.wte.weight"]["exp_avg"]
    return bytes(moment.numpy().tobytes()[:64])


def test_a_given_one_is_taken(make_trainer: Make, tmp_path: Path) -> None:
    whole = make_trainer("whole")
    whole.train()
    interrupt(make_trainer, "run", 13)
    place = tmp_path / "run" / "checkpoint-4"
    resumed = resume(make_trainer, "other", str(place))
    assert losses(resumed) == losses(whole)
    with pytest.raises(CheckpointNotFoundError, match="checkpoint-5"):
        resume(make_trainer, "other", str(tmp_path / "run" / "checkpoint-5"))


def test_what_the_trainer_has_saved_is_loaded_by_the_trainer(make_trainer: Make, tmp_path: Path) -> None:
    whole = make_trainer("whole")
    whole.train()
    for place in (True, str(tmp_path / "run" / "checkpoint-8")):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        trainer = make_trainer("run", stop=9)
        with pytest.raises(InterruptedError):
            trainer.train()
        resumed = resume(make_trainer, "run", place)
        assert losses(resumed) == losses(whole)
        assert (tmp_path / "run" / "checkpoint-12" / ".metadata").exists()
    with pytest.raises(ValueError, match="No valid checkpoint"):
        resume(make_trainer, "empty", True)


def test_the_model_alone(make_trainer: Make, tmp_path: Path) -> None:
    trainer = make_trainer("run", max_steps=4, save_only_model=True)
    manage_checkpoints(trainer)
    trainer.train()
    state = load_keys(checkpoint_id=str(tmp_path / "run" / "checkpoint-4"), no_dist=True)
    assert set(state["app"]) == {"model"}
    resumed = resume(make_trainer, "run", max_steps=5)
    assert [step for step, *_ in losses(resumed)] == [1, 2, 3, 4, 5]


def test_states_of_callbacks_come_back(make_trainer: Make) -> None:
    from transformers import EarlyStoppingCallback

    arguments = {
        "eval_strategy": "steps", "eval_steps": 4, "metric_for_best_model": "loss", "load_best_model_at_end": True,
        "restore_callback_states_from_checkpoint": True,
    }  # fmt: skip
    trainer = make_trainer("run", stop=9, callbacks=[EarlyStoppingCallback(9)], **arguments)
    trainer.callback_handler.callbacks[-2].early_stopping_patience_counter = 3
    manage_checkpoints(trainer)
    with pytest.raises(InterruptedError):
        trainer.train()
    saved = json.loads(
        load_keys("trainer", checkpoint_id=f"{trainer.args.output_dir}/checkpoint-8", no_dist=True)["trainer"]
    )
    counter = saved["state"]["stateful_callbacks"]["EarlyStoppingCallback"]["attributes"]
    again = make_trainer("run", max_steps=9, callbacks=[EarlyStoppingCallback(1)], **arguments)
    manage_checkpoints(again)
    again.train(resume_from_checkpoint=True)
    restored = next(c for c in again.callback_handler.callbacks if isinstance(c, EarlyStoppingCallback))
    assert restored.early_stopping_patience == 9
    assert restored.early_stopping_patience_counter == counter["early_stopping_patience_counter"]


def test_another_batch_is_warned_of(make_trainer: Make, caplog: pytest.LogCaptureFixture) -> None:
    interrupt(make_trainer, "run", 5)
    with caplog.at_level(logging.WARNING):
        resume(make_trainer, "run", max_steps=6, per_device_train_batch_size=6)
    assert "a step had 3 examples when the checkpoint was saved, and has 6 now" in caplog.text


def test_what_cannot_be_managed_is_refused(make_trainer: Make) -> None:
    trainer = make_trainer("run")
    manage_checkpoints(trainer)
    with pytest.raises(ValueError, match="managed already"):
        manage_checkpoints(trainer)
    trainer = make_trainer("run")
    trainer.is_deepspeed_enabled = True
    with pytest.raises(ValueError, match="DeepSpeed and XLA"):
        manage_checkpoints(trainer)
    trainer = make_trainer("run")
    trainer.args.push_to_hub = True
    with pytest.raises(ValueError, match="hub_strategy='end'"):
        manage_checkpoints(trainer)
    with pytest.raises(AttributeError, match="object has no _save_checkpoint"):
        manage_checkpoints(object())


STATE: Any = {"best_model_checkpoint": None, "global_step": 4}
SAVED: Any = {"state": STATE, "only_model": False, "batch": 3}
FOREIGN = [
    *("", "{", "null", "7", '"x"', "[]", "{}", "\0", "NaN", "a state", "\ufeff{}", "[" * 100_000),
    *(json.dumps(SAVED)[:-5], *(json.dumps({**SAVED, "state": each}) for each in ([], "x", None, 3, {}))),
    *(json.dumps({name: each for name, each in SAVED.items() if name != lost}) for lost in SAVED),
    *(json.dumps({**SAVED, "state": {**STATE, "best_model_checkpoint": each}}) for each in (3, True)),
    json.dumps({**SAVED, "state": {**STATE, "since": 2}}),
    *(3, None),
]


@pytest.mark.parametrize("given", [False, True])
def test_text_that_is_no_state_of_a_trainer_is_named(make_trainer: Make, tmp_path: Path, *, given: bool) -> None:
    place = tmp_path / "run" / "checkpoint-4"
    for text in FOREIGN:
        save({"trainer": text}, checkpoint_id=place)
        with pytest.raises(UnsupportedFormatError, match="its entry 'trainer' is no Trainer's state") as caught:
            resume(make_trainer, "run", place if given else True)
        assert str(place) in str(caught.value), text
