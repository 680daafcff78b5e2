"""The state of a Trainer as a state dict, and a check of the batch size before a load."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import torch
from transformers.trainer_callback import ExportableState, TrainerCallback

from dcp_core import PerRank
from dcp_manifest import library_logger
from dcp_state import RandomState, app_state
from dcp_transformers.export import describe_model

__all__ = ["RandomStates", "collect_state", "warn_of_batch"]

_log = library_logger(__name__)


class RandomStates(TrainerCallback):
    """The random states of a rank, now and at the beginning of the epoch, as a `Stateful`.

    Samplers draw the order of an epoch at its beginning. A resumed epoch draws the same order again, skips the examples
    that were seen, and only then continues with the random state of the save. So loaded states are kept until the
    Trainer sets them.

    A rank that the saving job did not have gets another rank's states, and derives those of Python, numpy and CUDA from
    them. That of torch's CPU generator stays the other rank's: some samplers, such as that which groups examples by
    length, draw one order on all ranks, which must agree on it.
    """

    loaded: dict[str, Any] | None = None
    """The loaded states, until the Trainer sets them."""
    _derives_for: int | None = None
    _epoch_start: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return both states."""
        return {"now": RandomState().state_dict(), "epoch_start": self._epoch_start}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep both states for later; no generator is set yet."""
        self.loaded, self._derives_for = state_dict, None

    def load_derived_state(self, state_dict: dict[str, Any], rank: int) -> None:
        """Keep another rank's states for later, for a rank that the saving job did not have."""
        self.loaded, self._derives_for = state_dict, rank

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        """Set the loaded state from which the epoch's order is drawn, if there is one, and note the current state."""
        if self.loaded and self.loaded["epoch_start"]:
            RandomState().load_state_dict(self.loaded["epoch_start"])
        self._epoch_start = RandomState().state_dict()

    def set_loaded(self, trainer: Any) -> None:
        """Set the generators to their states at the save, which are also those of an epoch that begins now."""
        if self.loaded is None:  # the checkpoint holds the model only
            return
        if self._derives_for is None:
            RandomState().load_state_dict(self.loaded["now"])
        else:
            RandomState().load_derived_state(self.loaded["now"], self._derives_for)
            torch.set_rng_state(self.loaded["now"]["torch"])
        if trainer.args.ignore_data_skip or float(trainer.state.epoch).is_integer():
            self._epoch_start = self.loaded["now"]
        self.loaded = None


def collect_state(trainer: Any, random: RandomStates, saved: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the state dict of a trainer, for a save or as the template of a load.

    Args:
        trainer: Trainer, whose model is prepared for training.
        random: Random states of this rank.
        saved: For a load, the checkpoint's description of its trainer; None for a save.
    """
    only_model = trainer.args.save_only_model if saved is None else saved["only_model"]
    state: dict[str, Any] = {"app": app_state(trainer.model)}
    if not only_model:
        scaler = getattr(trainer.accelerator, "scaler", None)
        values = {"random": PerRank(random)} | ({} if scaler is None else {"scaler": scaler})
        state["app"] = app_state(trainer.model, trainer.optimizer, scheduler=trainer.lr_scheduler, **values)
    if saved is None and trainer.is_world_process_zero():
        callbacks = (*trainer.callback_handler.callbacks, trainer.control)
        exportable = [each for each in callbacks if isinstance(each, ExportableState)]
        of_trainer = dataclasses.asdict(dataclasses.replace(trainer.state, stateful_callbacks=exportable))
        batch = trainer.get_total_train_batch_size(trainer.args)
        said = {"state": of_trainer, "only_model": only_model, "batch": batch}
        model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
        state |= {"trainer": json.dumps(said), **describe_model(model)}
    return state


def warn_of_batch(trainer: Any, saved: dict[str, Any]) -> None:
    """Log a warning if the batch size has changed: the Trainer derives epoch and position from the number of steps."""
    before, now = saved["batch"], trainer.get_total_train_batch_size(trainer.args)
    if before != now and trainer.is_world_process_zero():
        text = "a step had %d examples when the checkpoint was saved, and has %d now, so that position in the data and "
        text += "schedule differ: keep processes × per_device_train_batch_size × gradient_accumulation_steps the same"
        _log.warning(text, before, now)
