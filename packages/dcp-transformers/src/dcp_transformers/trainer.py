"""`manage_checkpoints`: the Trainer saves, keeps and resumes through a `CheckpointManager`.

It replaces the methods of one trainer that touch checkpoints, so that subclasses (`Seq2SeqTrainer`, those of TRL) keep
theirs. When to save stays the Trainer's decision; what a state is, is `trainer_state`'s.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from dcp_async import AsyncSaver
from dcp_core import load
from dcp_core.toolkit import absolute_id
from dcp_manager import CheckpointManager, CheckpointRecord, KeepAll, KeepLast, KeepPolicy, Saver
from dcp_manifest import scheme_of
from dcp_transformers.trainer_state import RandomStates, Saved, collect_state, weights_of

__all__ = ["TrainerCheckpoints", "manage_checkpoints"]

_REPLACED = (
    "train", "_save_checkpoint", "_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_scaler",
    "_load_rng_state", "_load_best_model",
)  # fmt: skip
_ELSEWHERE = ("is_deepspeed_enabled", "is_fsdp_xla_enabled")


def manage_checkpoints(
    trainer: Any,
    root: str | os.PathLike[str] | None = None,
    *,
    keep: int | KeepPolicy | None = None,
    saver: Saver | str | None = None,
    **options: Any,
) -> TrainerCheckpoints:
    """Let a Trainer save, keep and resume from checkpoints of this project; call it before `trainer.train(…)`.

    Each checkpoint is a folder `checkpoint-<step>` with model, optimizer, scheduler, scaler, `TrainerState` and the
    random states of every rank; the Trainer's own files are not written beside. Saves come when `save_strategy` says so.
    `trainer.train(resume_from_checkpoint=True)` takes the newest one that loads, on any world size; a path or URI takes
    that one. What the Trainer has saved itself before is loaded by the Trainer.

    Args:
        trainer: A `transformers.Trainer`, or an object of a subclass.
        root: Folder or URI above the checkpoints; None takes the trainer's `output_dir`.
        keep: How many checkpoints stay, or a policy; the best one of `metric_for_best_model` stays as well. None takes
            `save_total_limit`.
        saver: Saves in the background: `"process"`, `"thread"`, or a saver that the caller closes; None saves while the
            training waits.
        options: More of `CheckpointManager`, such as `storage_options` or `tolerated_failures`.

    Returns:
        What is in charge now.

    Raises:
        ValueError: The trainer trains with DeepSpeed or XLA, which have formats of their own; or pushes checkpoints to
            the Hub; or has been passed in before.
        AttributeError: This version of transformers has other methods.

    Ranks: every rank; not collective.
    Source: transformers 5.23 `Trainer`, the methods replaced.
    """
    return TrainerCheckpoints(trainer, root, keep=keep, saver=saver, options=options)


class TrainerCheckpoints:
    """The checkpoints of one Trainer; made by `manage_checkpoints`."""

    def __init__(
        self,
        trainer: Any,
        root: str | os.PathLike[str] | None,
        *,
        keep: int | KeepPolicy | None,
        saver: Saver | str | None,
        options: dict[str, Any],
    ) -> None:
        _check(trainer)
        self._trainer = trainer
        self._root = root
        self._keep = keep
        self._saver = saver
        self._options = options
        self._manager: CheckpointManager | None = None
        self._random = RandomStates()
        self._source: int | str | None = None
        """What the running `train` resumes from: a step under the root, or an id; None if not from one of ours."""
        self._newest = False
        """Whether that is because it was the newest that loads."""
        self._saved = Saved()
        self._own = {name: getattr(trainer, name) for name in _REPLACED}
        for name in _REPLACED:
            setattr(trainer, name, getattr(self, name))
        trainer.add_callback(self._random)

    def latest(self) -> int | None:
        """Return the highest step under the root whose checkpoint is not known to be damaged, or None.

        Ranks: one; not collective.
        """
        return self._make_manager(None, None).latest()

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, **arguments: Any) -> Any:
        """Train as the Trainer does; returns when saves in the background have ended, too.

        Args:
            resume_from_checkpoint: True, a path or a URI.
            trial: Of a hyperparameter search.
            arguments: Of the Trainer's `train`.

        Raises:
            CheckpointNotFoundError: The checkpoint to resume from is not there, or none loads.
            CheckpointException, …: What loading and saving raise.

        Ranks: every rank; collective.
        """
        with contextlib.ExitStack() as stack:
            saver = self._saver
            if isinstance(saver, str):
                saver = stack.enter_context(AsyncSaver(saver))
            self._manager = stack.enter_context(self._make_manager(saver, trial))
            while True:
                with tempfile.TemporaryDirectory() as folder:
                    place = self._find(resume_from_checkpoint, folder)
                    try:
                        return self._own["train"](place, trial, **arguments)
                    except _DamagedError:  # the one before it is the newest now
                        continue

    def _make_manager(self, saver: Saver | None, trial: Any) -> CheckpointManager:
        args = self._trainer.args
        keep = args.save_total_limit if self._keep is None else self._keep
        policy = keep if isinstance(keep, KeepPolicy) else KeepLast(keep) if keep else KeepAll()
        root = self._trainer._get_output_dir(trial) if self._root is None else self._root
        best = _KeepBestOf(self._trainer)
        prefix = f"{PREFIX_CHECKPOINT_DIR}-"
        return CheckpointManager(root, keep_policy=policy | best, saver=saver, folder_prefix=prefix, **self._options)

    @property
    def _running(self) -> CheckpointManager:
        if self._manager is None:
            raise RuntimeError("checkpoints are saved and loaded while trainer.train(…) runs only")
        return self._manager

    def _find(self, resume: Any, folder: str) -> Any:
        """Return what the Trainer is to resume from: nothing, one of its own, or a folder with a `TrainerState`."""
        self._source, self._newest, self._saved = None, False, Saved()
        if resume is None or resume is False:
            return None
        described = Saved.template()
        if resume is True:
            found = self._running.restore(described)
            if found is None:
                return True
            self._source, self._newest = found.step, True
        else:
            place = os.fspath(absolute_id(resume)).rstrip("/")
            if _is_trainers_own(place):
                return resume
            self._source = self._step_of(place)
            if isinstance(self._source, int):
                self._running.restore(described, step=self._source)
            else:
                load(described, checkpoint_id=place, storage_reader=None)
        self._saved = Saved.from_state(described)
        self._saved.warn_of_batch(self._trainer)
        Path(folder, TRAINER_STATE_NAME).write_text(self._saved.trainer_state, encoding="utf-8")
        return folder

    def _step_of(self, place: str) -> int | str:
        """Return the step of a checkpoint under the root, or the place itself."""
        found = re.search(r"-(\d+)$", place)
        step = int(found[1]) if found else None
        return step if step is not None and self._running.checkpoint_id(step) == place else place

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        del model
        trainer, step = self._trainer, self._trainer.state.global_step
        if trial is None:
            trainer.store_flos()
        if trainer.state.best_global_step == step:
            trainer.state.best_model_checkpoint = self._running.checkpoint_id(step)
        self._running.maybe_save(step, lambda: collect_state(trainer, self._random))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._source is None:
            self._own["_load_from_checkpoint"](resume_from_checkpoint, model)
        # Otherwise all is loaded in one go, when there is an optimizer.

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._source is None:
            self._own["_load_optimizer_and_scheduler"](checkpoint)
            return
        state = collect_state(self._trainer, self._random, only_model=self._saved.only_model, described=False)
        if isinstance(self._source, int):
            restored = self._running.restore(state, step=None if self._newest else self._source)
            if restored is None or restored.step != self._source:
                raise _DamagedError
        else:
            load(state, checkpoint_id=self._source)
        self._saved.restore_best(self._trainer)

    def _load_scaler(self, checkpoint: str | None) -> None:
        if self._source is None:
            self._own["_load_scaler"](checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._source is None:
            self._own["_load_rng_state"](checkpoint)
        else:
            self._random.set_loaded(self._trainer)

    def _load_best_model(self) -> None:
        place = self._trainer.state.best_model_checkpoint
        if _is_trainers_own(place):
            self._own["_load_best_model"]()
            return
        self._running.wait()
        load(weights_of(self._trainer), checkpoint_id=place)


class _DamagedError(Exception):
    """The newest checkpoint turned out to be damaged while it was loaded."""


class _KeepBestOf(KeepPolicy):
    """Keeps the checkpoint of a Trainer's best step."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def keep(self, records: Sequence[CheckpointRecord], now_seconds: float) -> set[int]:
        """See `KeepPolicy`."""
        del now_seconds
        best = self._trainer.state.best_global_step
        return {record.step for record in records if record.step == best}


def _is_trainers_own(place: str) -> bool:
    """Whether a local folder holds a checkpoint that the Trainer has written itself."""
    is_local = scheme_of(place) == "file"
    return is_local and Path(place, TRAINER_STATE_NAME).is_file() and not Path(place, ".metadata").exists()


def _check(trainer: Any) -> None:
    missing = [name for name in (*_REPLACED, "_get_output_dir", "store_flos") if not hasattr(trainer, name)]
    if missing:
        raise AttributeError(
            f"{type(trainer).__name__} has no {', '.join(missing)}: it is no Trainer of transformers 5, or of a version "
            "that this package does not know"
        )
    if set(_REPLACED) & set(vars(trainer)):
        raise ValueError("the checkpoints of this trainer are managed already; call manage_checkpoints once")
    for name in _ELSEWHERE:
        if getattr(trainer, name, False):
            raise ValueError(f"the trainer has {name}: such checkpoints have a format of their own; leave them to it")
    if trainer.args.push_to_hub and trainer.args.hub_strategy != "end":
        raise ValueError(
            f"hub_strategy={str(trainer.args.hub_strategy)!r} uploads files that only the Trainer's own checkpoints "
            "have; choose hub_strategy='end', or upload what export_model writes"
        )
