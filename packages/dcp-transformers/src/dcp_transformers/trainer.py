"""`manage_checkpoints`: a Trainer saves, keeps and resumes through a `CheckpointManager`.

Methods are replaced on this one object during training, so subclasses (`Seq2SeqTrainer`, TRL's) keep theirs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_callback import ExportableState, TrainerCallback, TrainerState

from dcp_async import AsyncSaver
from dcp_base.logs import library_logger
from dcp_core import PerRank, load
from dcp_core.arguments import absolute_id
from dcp_core.errors import UnsupportedFormatError
from dcp_manager import CheckpointManager, CheckpointRecord, KeepAll, KeepLast, KeepPolicy
from dcp_manager.background import Saver
from dcp_state import RandomState, app_state
from dcp_transformers.export import describe_model, is_peft

_STATE_FILE = "trainer_state.json"  # of the Trainer
_LOADED = ("best_model", "from_checkpoint", "optimizer_and_scheduler", "rng_state", "scaler")
_REPLACED = ["_save_checkpoint", *(f"_load_{what}" for what in _LOADED)]


def manage_checkpoints(
    trainer: Any,
    root: str | os.PathLike[str] | None = None,
    *,
    keep: int | KeepPolicy | None = None,
    saver: Saver | str | None = None,
    **options: Any,
) -> TrainerCheckpoints:
    """Let a Trainer save, keep and resume with this project; call it before `trainer.train(…)`.

    ```text
    trainer = Trainer(model, arguments, train_dataset=dataset)
    manage_checkpoints(trainer, keep=3)
    trainer.train(resume_from_checkpoint=True)
    ```

    Directories `checkpoint-<step>` contain model, optimizer, scheduler, scaler, `TrainerState` and every rank's random
    states; of a PEFT model, what is trained. `save_strategy` determines when to save. `resume_from_checkpoint=True`
    resumes from the newest loadable checkpoint on any world size; a path or URI selects one. The Trainer loads its own.

    Args:
        trainer: `transformers.Trainer`, or a subclass's object.
        root: Directory or URI of the checkpoints; None for `output_dir`.
        keep: Number to keep, or a policy, in addition to the best by `metric_for_best_model`; None for
            `save_total_limit`.
        saver: Background saver: `"process"`, `"thread"`, or an object that the caller closes. None blocks.
        options: Arguments of `CheckpointManager`, such as `storage_options`.

    Returns:
        An object whose `latest()` is the highest step without known damage, or None.

    Raises:
        ValueError: The trainer uses DeepSpeed's or XLA's own format, pushes checkpoints to the Hub, or was passed
            before.
        AttributeError: This version of transformers lacks methods to replace.

    Ranks: every rank; not collective.
    Source: transformers 5.23 `Trainer`, the methods replaced.
    """
    _check(trainer)
    return TrainerCheckpoints(trainer, root, keep, saver, options)


class TrainerCheckpoints:
    """Checkpoints of one Trainer, created by `manage_checkpoints`."""

    def __init__(self, trainer: Any, root: Any, keep: Any, saver: Any, options: Mapping[str, Any]) -> None:
        self._trainer = trainer
        self._given = root, keep, saver, options
        self._train = trainer.train
        self._random = RandomStates()
        trainer.train = self.train
        trainer.add_callback(self._random)

    def latest(self) -> int | None:
        """Return the highest step without known damage, or None. Ranks: one; not collective."""
        return self._manager(None, None).latest()

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, **arguments: Any) -> Any:
        """Train like `Trainer.train`; return after background saves end.

        Raises CheckpointNotFoundError, or an error of `dcp_core.load` or `save`.

        Ranks: every rank; collective.
        """
        with contextlib.ExitStack() as stack:
            saver = self._given[2]
            if isinstance(saver, str):
                saver = stack.enter_context(AsyncSaver(saver))
            manager = stack.enter_context(self._manager(saver, trial))
            while True:
                self._random.loaded = None
                run = _Run(self._trainer, manager, self._random)
                # Once the newest checkpoint is known to be damaged, retry with the second newest.
                with contextlib.suppress(_DamagedError), tempfile.TemporaryDirectory() as folder:
                    place = run.find(resume_from_checkpoint, Path(folder))
                    vars(self._trainer).update(run.methods())
                    try:
                        return self._train(place, trial, **arguments)
                    finally:
                        for name in run.methods():
                            vars(self._trainer).pop(name, None)

    def _manager(self, saver: Saver | None, trial: Any) -> CheckpointManager:
        root, keep, _, options = self._given
        root = self._trainer._get_output_dir(trial) if root is None else root
        keep = self._trainer.args.save_total_limit if keep is None else keep
        kept = _Best(self._trainer) | (keep if isinstance(keep, KeepPolicy) else KeepLast(keep) if keep else KeepAll())
        return CheckpointManager(root, keep_policy=kept, saver=saver, folder_prefix="checkpoint-", **options)


@dataclass
class _Run:
    """One call of `train`: its checkpoint, and the methods that replace the Trainer's."""

    _trainer: Any
    _manager: CheckpointManager
    _random: RandomStates
    _source: int | str | None = None
    """Newest step, or the id that was passed; None without one, or for the Trainer's own format."""
    _saved: dict[str, Any] = field(default_factory=dict)

    def find(self, resume: Any, folder: Path) -> Any:
        said = {"trainer": ""}
        if resume is True:
            self._source = getattr(self._manager.restore(said), "step", None)
        elif resume and not _is_trainers_own(resume):
            self._source = os.fspath(absolute_id(resume))
            load(said, checkpoint_id=self._source)
        if self._source is None:
            return resume
        try:
            self._saved = json.loads(said["trainer"])
            state, _, _ = (self._saved[name] for name in ("state", "only_model", "batch"))
            if "://" in (state["best_model_checkpoint"] or ""):  # the Trainer expects a local directory
                state["best_model_checkpoint"] = None
            (folder / _STATE_FILE).write_text(json.dumps(state), encoding="utf-8")
            TrainerState.load_from_json(os.fspath(folder / _STATE_FILE))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            source = self._source if isinstance(self._source, str) else self._manager.checkpoint_id(self._source)
            text = f"its entry 'trainer' is no Trainer's state ({type(error).__name__}: {error}): manage_checkpoints "
            text += "did not write it, or it is damaged. Resume from another checkpoint"
            raise UnsupportedFormatError(f"{source}: {text}") from error
        _warn_of_batch(self._trainer, self._saved)
        return os.fspath(folder)

    def methods(self) -> dict[str, Callable[..., None]]:
        found: dict[str, Callable[..., None]] = {"_save_checkpoint": self._save, "_load_best_model": self._load_best}
        if self._source is not None:
            found["_load_from_checkpoint"] = found["_load_scaler"] = lambda *_: None  # the next method loads everything
            found["_load_optimizer_and_scheduler"] = self._load
            found["_load_rng_state"] = lambda _: self._random.set_loaded(self._trainer)
        return found

    def _save(self, _model: Any, trial: Any) -> None:
        state = self._trainer.state
        if trial is None:
            self._trainer.store_flos()
        if state.best_global_step == state.global_step:
            state.best_model_checkpoint = self._manager.checkpoint_id(state.global_step)
        self._manager.maybe_save(state.global_step, lambda: _collect_state(self._trainer, self._random))

    def _load(self, _checkpoint: Any) -> None:
        state = _collect_state(self._trainer, self._random, self._saved)
        if isinstance(self._source, str):
            load(state, checkpoint_id=self._source)
        elif (restored := self._manager.restore(state)) is None or restored.step != self._source:
            raise _DamagedError
        best = self._trainer.state.best_global_step
        if best in {record.step for record in self._manager.checkpoints()}:
            self._trainer.state.best_model_checkpoint = self._manager.checkpoint_id(best)

    def _load_best(self) -> None:
        place = self._trainer.state.best_model_checkpoint
        if _is_trainers_own(place):
            type(self._trainer)._load_best_model(self._trainer)
            return
        self._manager.wait()
        load(_collect_state(self._trainer, self._random, {"only_model": True}), checkpoint_id=place)


class _DamagedError(Exception):
    """The newest checkpoint is damaged."""


@dataclass
class _Best(KeepPolicy):
    _trainer: Any

    def keep(self, records: Sequence[CheckpointRecord], _: float) -> set[int]:
        return {record.step for record in records if record.step == self._trainer.state.best_global_step}


def _is_trainers_own(place: str | os.PathLike[str]) -> bool:
    return Path(place, _STATE_FILE).is_file() and not Path(place, ".metadata").exists()


def _check(trainer: Any) -> None:
    missing = [name for name in _REPLACED if not hasattr(trainer, name)]
    if missing:
        raise AttributeError(f"{type(trainer).__name__} has no {', '.join(missing)}: no Trainer, or an unknown version")
    if "train" in vars(trainer):
        raise ValueError("the checkpoints of this trainer are managed already; call manage_checkpoints once")
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_xla_enabled:
        raise ValueError("checkpoints of DeepSpeed and XLA have their own formats; leave them to the Trainer")
    if trainer.args.push_to_hub and trainer.args.hub_strategy != "end":
        raise ValueError("only the Trainer's own checkpoints can be pushed; choose hub_strategy='end', or export_model")


_log = library_logger(__name__)


class RandomStates(TrainerCallback):
    """A rank's random states, now and at the beginning of the epoch.

    A resumed epoch draws its order again from the state at its beginning, skips seen examples, and continues with the
    saved state, so loaded states wait until the Trainer sets them. A rank without saved states derives them from
    another rank's, but keeps its torch CPU state, from which some samplers draw one order on all ranks.
    """

    loaded: dict[str, Any] | None = None
    """States until the Trainer sets them."""
    _derives_for: int | None = None
    _epoch_start: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return both states."""
        return {"now": RandomState().state_dict(), "epoch_start": self._epoch_start}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep both states for later."""
        self.loaded, self._derives_for = state_dict, None

    def load_derived_state(self, state_dict: dict[str, Any], rank: int) -> None:
        """Keep another rank's states, for a rank without its own."""
        self.loaded, self._derives_for = state_dict, rank

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        """Set the loaded state for the epoch's order; record the state."""
        if self.loaded and self.loaded["epoch_start"]:
            RandomState().load_state_dict(self.loaded["epoch_start"])
        self._epoch_start = RandomState().state_dict()

    def set_loaded(self, trainer: Any) -> None:
        """Set the generators to their saved states."""
        if self.loaded is None:  # the checkpoint contains only the model
            return
        if self._derives_for is None:
            RandomState().load_state_dict(self.loaded["now"])
        else:
            RandomState().load_derived_state(self.loaded["now"], self._derives_for)
            torch.set_rng_state(self.loaded["now"]["torch"])
        if trainer.args.ignore_data_skip or float(trainer.state.epoch).is_integer():
            self._epoch_start = self.loaded["now"]
        self.loaded = None


def _collect_state(trainer: Any, random: RandomStates, saved: dict[str, Any] | None = None) -> dict[str, Any]:
    only_model = trainer.args.save_only_model if saved is None else saved["only_model"]
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    only = True if is_peft(model) else None
    state: dict[str, Any] = {"app": app_state(trainer.model, trainable_only=only)}
    if not only_model:
        scaler = getattr(trainer.accelerator, "scaler", None)
        values = {"random": PerRank(random)} | ({} if scaler is None else {"scaler": scaler})
        state["app"] = app_state(
            trainer.model, trainer.optimizer, scheduler=trainer.lr_scheduler, trainable_only=only, **values
        )
    if saved is None and trainer.is_world_process_zero():
        callbacks = (*trainer.callback_handler.callbacks, trainer.control)
        exportable = [each for each in callbacks if isinstance(each, ExportableState)]
        of_trainer = dataclasses.asdict(dataclasses.replace(trainer.state, stateful_callbacks=exportable))
        batch = trainer.get_total_train_batch_size(trainer.args)
        said = {"state": of_trainer, "only_model": only_model, "batch": batch}
        state |= {"trainer": json.dumps(said), **describe_model(model)}
    return state


def _warn_of_batch(trainer: Any, saved: dict[str, Any]) -> None:
    """Warn of a changed batch size: the Trainer derives its position from the steps."""
    before, now = saved["batch"], trainer.get_total_train_batch_size(trainer.args)
    if before != now and trainer.is_world_process_zero():
        text = "a step had %d examples when the checkpoint was saved, and has %d now, so that position in the data and "
        text += "schedule differ: keep processes × per_device_train_batch_size × gradient_accumulation_steps the same"
        _log.warning(text, before, now)
