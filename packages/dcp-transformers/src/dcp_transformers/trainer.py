"""`manage_checkpoints`: a Trainer saves, keeps and resumes through a `CheckpointManager`.

While it trains, the methods of this one trainer that touch checkpoints are replaced, so that subclasses
(`Seq2SeqTrainer`, the trainers of TRL) keep their own methods. The Trainer decides when to save; `trainer_state`
collects the state.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dcp_async import AsyncSaver
from dcp_core import load
from dcp_core.toolkit import absolute_id
from dcp_manager import CheckpointManager, CheckpointRecord, KeepAll, KeepLast, KeepPolicy, Saver
from dcp_transformers.trainer_state import RandomStates, collect_state, warn_of_batch

__all__ = ["TrainerCheckpoints", "manage_checkpoints"]

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
    """Let a Trainer save, keep and resume from this project's checkpoints; call it before `trainer.train(…)`.

    Each checkpoint is a folder `checkpoint-<step>` with model, optimizer, scheduler, scaler, `TrainerState` and the
    random states of every rank; the Trainer's own files are not written. `save_strategy` determines when to save.
    `trainer.train(resume_from_checkpoint=True)` resumes from the newest checkpoint that can be loaded, on any world
    size; a path or URI instead of True resumes from the checkpoint there. Checkpoints in the Trainer's own format are
    loaded by the Trainer.

    Args:
        trainer: The `transformers.Trainer`, or an object of a subclass.
        root: Folder or URI that contains the checkpoints; None uses the trainer's `output_dir`.
        keep: Number of checkpoints to keep, or a policy; the best one by `metric_for_best_model` is kept as well. None
            uses `save_total_limit`.
        saver: Saver that saves in the background: `"process"`, `"thread"`, or an object that the caller closes. None
            saves while the training waits.
        options: Further arguments of `CheckpointManager`, such as `storage_options` or `tolerated_failures`.

    Returns:
        The object that now handles the checkpoints of the trainer.

    Raises:
        ValueError: The trainer uses DeepSpeed or XLA's FSDP, which have formats of their own; or it pushes checkpoints
            to the Hub; or it was passed to this function before.
        AttributeError: The trainer lacks methods to replace, because this version of transformers is not supported.

    Ranks: every rank; not collective.
    Source: transformers 5.23 `Trainer`, the methods replaced.

    Example:
        ```text
        trainer = Trainer(model, arguments, train_dataset=dataset)
        manage_checkpoints(trainer, keep=3)
        trainer.train(resume_from_checkpoint=True)
        ```
    """
    _check(trainer)
    return TrainerCheckpoints(trainer, root, keep, saver, options)


class TrainerCheckpoints:
    """The checkpoints of one Trainer; made by `manage_checkpoints`."""

    def __init__(self, trainer: Any, root: Any, keep: Any, saver: Any, options: Mapping[str, Any]) -> None:
        self._trainer = trainer
        self._given = root, keep, saver, options
        self._train = trainer.train
        self._random = RandomStates()
        trainer.train = self.train
        trainer.add_callback(self._random)

    def latest(self) -> int | None:
        """Return the highest step under the root whose checkpoint is not known to be damaged, or None.

        Ranks: one; not collective.
        """
        return self._manager(None, None).latest()

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, **arguments: Any) -> Any:
        """Train like `Trainer.train`; returns after saves in the background have ended, too.

        Args:
            resume_from_checkpoint: True for the newest checkpoint that can be loaded, or a path or URI of a checkpoint.
            trial: Trial of a hyperparameter search.
            arguments: Further arguments of `Trainer.train`.

        Raises:
            CheckpointNotFoundError: The checkpoint to resume from does not exist, or no checkpoint can be loaded.
            CheckpointException, …: A load or a save failed; see `dcp_core.load` and `dcp_core.save`.

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
                # The second newest is the newest once that is known to be damaged.
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
    """One call of `train`: the checkpoint it resumes from, and the methods that replace the Trainer's."""

    _trainer: Any
    _manager: CheckpointManager
    _random: RandomStates
    _source: int | str | None = None
    """Step of the newest checkpoint, or the given id; None without one, or for the Trainer's own format."""
    _saved: dict[str, Any] = field(default_factory=dict)

    def find(self, resume: Any, folder: Path) -> Any:
        """Return the Trainer's argument: nothing, a checkpoint in its format, or a folder with a `TrainerState`."""
        said = {"trainer": ""}
        if resume is True:
            self._source = getattr(self._manager.restore(said), "step", None)
        elif resume and not _is_trainers_own(resume):
            self._source = os.fspath(absolute_id(resume))
            load(said, checkpoint_id=self._source)
        if self._source is None:
            return resume
        self._saved = json.loads(said["trainer"])
        warn_of_batch(self._trainer, self._saved)
        state = self._saved["state"]
        if "://" in (state["best_model_checkpoint"] or ""):  # the Trainer would miss a folder of that name
            state["best_model_checkpoint"] = None
        (folder / _STATE_FILE).write_text(json.dumps(state), encoding="utf-8")
        return os.fspath(folder)

    def methods(self) -> dict[str, Callable[..., None]]:
        """Return the replacing methods, by the names of the Trainer's methods."""
        found: dict[str, Callable[..., None]] = {"_save_checkpoint": self._save, "_load_best_model": self._load_best}
        if self._source is not None:
            found["_load_from_checkpoint"] = found["_load_scaler"] = lambda *_: None  # all at once, by the next one
            found["_load_optimizer_and_scheduler"] = self._load
            found["_load_rng_state"] = lambda _: self._random.set_loaded(self._trainer)
        return found

    def _save(self, _model: Any, trial: Any) -> None:
        state = self._trainer.state
        if trial is None:
            self._trainer.store_flos()
        if state.best_global_step == state.global_step:
            state.best_model_checkpoint = self._manager.checkpoint_id(state.global_step)
        self._manager.maybe_save(state.global_step, lambda: collect_state(self._trainer, self._random))

    def _load(self, _checkpoint: Any) -> None:
        state = collect_state(self._trainer, self._random, self._saved)
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
        load(collect_state(self._trainer, self._random, {"only_model": True}), checkpoint_id=place)


class _DamagedError(Exception):
    """The newest checkpoint turned out to be damaged while it was loaded."""


@dataclass
class _Best(KeepPolicy):
    """Keeps the checkpoint of a Trainer's best step."""

    _trainer: Any

    def keep(self, records: Sequence[CheckpointRecord], _: float) -> set[int]:
        """See `KeepPolicy`."""
        return {record.step for record in records if record.step == self._trainer.state.best_global_step}


def _is_trainers_own(place: str | os.PathLike[str]) -> bool:
    """Whether a local folder holds a checkpoint in the Trainer's own format."""
    return Path(place, _STATE_FILE).is_file() and not Path(place, ".metadata").exists()


def _check(trainer: Any) -> None:
    missing = [name for name in _REPLACED if not hasattr(trainer, name)]
    if missing:
        raise AttributeError(f"{type(trainer).__name__} has no {', '.join(missing)}: no Trainer, or an unknown version")
    if "train" in vars(trainer):
        raise ValueError("the checkpoints of this trainer are managed already; call manage_checkpoints once")
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_xla_enabled:
        raise ValueError("checkpoints of DeepSpeed and XLA have formats of their own; leave them to the Trainer")
    if trainer.args.push_to_hub and trainer.args.hub_strategy != "end":
        raise ValueError("only the Trainer's own checkpoints can be pushed; choose hub_strategy='end', or export_model")
