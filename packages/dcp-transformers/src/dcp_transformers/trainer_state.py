"""The state of a Trainer as a state dict, and what of it is known before there is a model to load into."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from transformers.trainer_callback import ExportableState, TrainerCallback

from dcp_core import PerRank
from dcp_manifest import library_logger
from dcp_state import RandomState, app_state
from dcp_transformers.export import describe_model

__all__ = ["RandomStates", "collect_state", "warn_of_batch"]

_log = library_logger(__name__)


class RandomStates(TrainerCallback):
    """The random states of a rank, now and at the beginning of the epoch, as a `Stateful`.

    Samplers draw the order of an epoch at its beginning: a resumed one draws it again, skips what was seen, and only
    then goes on with the state of the save. What is loaded waits until the Trainer asks for it.
    """

    def __init__(self) -> None:
        self.loaded: dict[str, Any] | None = None
        """What a load gave, until the Trainer asks for it."""
        self._epoch_start: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return both states."""
        return {"now": RandomState().state_dict(), "epoch_start": self._epoch_start}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take both states, and set no generator yet."""
        self.loaded = state_dict

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        """Set or note the state from which the order of the epoch is drawn."""
        if self.loaded and self.loaded["epoch_start"]:
            RandomState().load_state_dict(self.loaded["epoch_start"])
        self._epoch_start = RandomState().state_dict()

    def set_loaded(self, trainer: Any) -> None:
        """Set the generators as they were at the save; an epoch that begins here, begins with them."""
        if self.loaded is None:  # the checkpoint holds the model only
            return
        RandomState().load_state_dict(self.loaded["now"])
        if trainer.args.ignore_data_skip or float(trainer.state.epoch).is_integer():
            self._epoch_start = self.loaded["now"]
        self.loaded = None


def collect_state(trainer: Any, random: RandomStates, saved: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the state dict of a trainer, to save it or to load into it.

    Args:
        trainer: Whose model is prepared for training.
        random: Of this rank.
        saved: To load: what the checkpoint says of its trainer. None to save.
    """
    only_model = trainer.args.save_only_model if saved is None else saved["only_model"]
    state: dict[str, Any] = {"app": app_state(trainer.model)}
    if not only_model:
        scaler = getattr(trainer.accelerator, "scaler", None)
        values = {"random": PerRank(random, otherwise="modulo")} | ({} if scaler is None else {"scaler": scaler})
        state["app"] = app_state(trainer.model, trainer.optimizer, scheduler=trainer.lr_scheduler, **values)
    if saved is None and trainer.is_world_process_zero():
        callbacks = (*trainer.callback_handler.callbacks, trainer.control)
        exportable = [each for each in callbacks if isinstance(each, ExportableState)]
        batch = trainer.get_total_train_batch_size(trainer.args)
        of_trainer = dataclasses.asdict(dataclasses.replace(trainer.state, stateful_callbacks=exportable))
        said = {"state": of_trainer, "only_model": only_model, "batch": batch}
        model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
        state |= {"trainer": json.dumps(said), **describe_model(model)}
    return state


def warn_of_batch(trainer: Any, saved: dict[str, Any]) -> None:
    """Log a warning if steps are not what they were: the Trainer takes epoch and position from their number."""
    before, now = saved["batch"], trainer.get_total_train_batch_size(trainer.args)
    if before != now and trainer.is_world_process_zero():
        _log.warning(
            "a step had %d examples when the checkpoint was saved, and has %d now: position in the data and schedule "
            "follow from the number of steps, so they are not those of the save. Choose per_device_train_batch_size "
            "and gradient_accumulation_steps so that their product with the number of processes stays the same",
            before,
            now,
        )
