"""The state of a Trainer as a state dict, and what of it is known before there is a model to load into."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from transformers.trainer_callback import ExportableState, TrainerCallback

from dcp_core import PerRank
from dcp_manifest import library_logger, scheme_of
from dcp_state import RandomState, app_state
from dcp_transformers.description import describe_model

__all__ = ["RandomStates", "Saved", "collect_state", "weights_of"]

_log = library_logger(__name__)
_TRAINER = "trainer"
_APP = "app"


class RandomStates(TrainerCallback):  # type: ignore[misc] # transformers is not there when types are checked
    """The random states of a rank, now and at the beginning of the epoch, as a `Stateful`.

    Samplers draw the order of an epoch at its beginning: a resumed one draws it again, skips what was seen, and only
    then goes on with the state of the save. What is loaded waits until the Trainer asks for it.
    """

    def __init__(self) -> None:
        self._epoch_start: dict[str, Any] = {}
        self._loaded: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return both states."""
        return {"now": RandomState().state_dict(), "epoch_start": self._epoch_start}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take both states, and set no generator yet."""
        self._loaded = state_dict

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Forget a state that an earlier `train` has loaded, when this one begins at the first step."""
        del args, control
        if state.global_step == 0:
            self._loaded = None

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Set or note the state from which the order of the epoch is drawn."""
        del args, state, control
        if self._loaded is not None and self._loaded["epoch_start"]:
            RandomState().load_state_dict(self._loaded["epoch_start"])
        self._epoch_start = RandomState().state_dict()

    def set_loaded(self, trainer: Any) -> None:
        """Set the generators as they were at the save; an epoch that begins here, begins with them."""
        if self._loaded is None:  # the checkpoint holds the model only
            return
        RandomState().load_state_dict(self._loaded["now"])
        if trainer.args.ignore_data_skip or float(trainer.state.epoch).is_integer():
            self._epoch_start = self._loaded["now"]
        self._loaded = None


@dataclass(frozen=True, slots=True)
class Saved:
    """What a checkpoint says of its Trainer.

    Args:
        trainer_state: The `TrainerState`, as JSON.
        only_model: Whether optimizer, scheduler and random states were left out (`save_only_model`).
        batch: Examples of one step of all ranks.
    """

    trainer_state: str = ""
    only_model: bool = False
    batch: int = 0

    @staticmethod
    def template() -> dict[str, Any]:
        """Return a state dict to load into, for `from_state`."""
        return {_TRAINER: ""}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Saved:
        """Read what was loaded."""
        return cls(**json.loads(state[_TRAINER]))

    @classmethod
    def of(cls, trainer: Any) -> Saved:
        """Return what is to be said of a trainer now, the states of its callbacks included."""
        callbacks = [*trainer.callback_handler.callbacks, trainer.control]
        state = dataclasses.replace(
            trainer.state, stateful_callbacks=[each for each in callbacks if isinstance(each, ExportableState)]
        )
        batch = trainer.get_total_train_batch_size(trainer.args)
        return cls(json.dumps(dataclasses.asdict(state)), trainer.args.save_only_model, batch)

    def warn_of_batch(self, trainer: Any) -> None:
        """Log a warning if steps are not what they were: the Trainer takes epoch and position from their number."""
        batch = trainer.get_total_train_batch_size(trainer.args)
        if batch != self.batch and trainer.is_world_process_zero():
            _log.warning(
                "a step had %d examples when the checkpoint was saved, and has %d now: the position in the data and the "
                "schedule follow from the number of steps, so they are not those of the save. Choose "
                "per_device_train_batch_size and gradient_accumulation_steps so that their product with the number of "
                "processes stays the same",
                self.batch,
                batch,
            )

    def restore_best(self, trainer: Any) -> None:
        """Name the best checkpoint again if it has a URI, which the Trainer takes for a folder that is gone."""
        best = json.loads(self.trainer_state)["best_model_checkpoint"]
        if best is not None and scheme_of(best) != "file":
            trainer.state.best_model_checkpoint = best


def collect_state(
    trainer: Any, random: RandomStates, *, only_model: bool | None = None, described: bool = True
) -> dict[str, Any]:
    """Return the state dict of a trainer, to save it or to load into it.

    Args:
        trainer: Whose model is prepared for training.
        random: Of this rank.
        only_model: Whether it is the model's state alone; None as `save_only_model` says.
        described: With what `Saved` and exports need, of one rank.
    """
    if trainer.args.save_only_model if only_model is None else only_model:
        state = weights_of(trainer)
    else:
        scaler = getattr(trainer.accelerator, "scaler", None)
        values = {} if scaler is None else {"scaler": scaler}
        state = {
            _APP: app_state(
                trainer.model,
                trainer.optimizer,
                scheduler=trainer.lr_scheduler,
                random=PerRank(random, otherwise="modulo"),
                **values,
            )
        }
    if described and trainer.is_world_process_zero():
        unwrapped = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
        state |= {_TRAINER: json.dumps(dataclasses.asdict(Saved.of(trainer))), **describe_model(unwrapped)}
    return state


def weights_of(trainer: Any) -> dict[str, Any]:
    """Return the part of the state dict that is the model's."""
    return {_APP: app_state(trainer.model)}
