"""`DcpCheckpointManager`: the checkpoint manager that torchtitan's trainer expects, implemented over `dcp_manager`.

What is saved and when follows torchtitan's documentation; `dcp_manager` decides which checkpoints are kept and found.

Source: torchtitan 0.3 `components/checkpointer` (`BaseCheckpointManager`, options, names of folders and states).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchtitan.components.checkpointer import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    BaseCheckpointManager,
    CheckpointManager,
    ModelWrapper,
)
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.tools import filesystem
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import GarbageCollection

from dcp_core import CheckpointNotFoundError, load
from dcp_core.errors import RANK_ERRORS
from dcp_manager import CheckpointManager as RunManager
from dcp_manager import KeepLast
from dcp_ranks import make_coordinator
from dcp_torchtitan.background import BackgroundSaver
from dcp_torchtitan.hugging_face import export_model, load_model

__all__ = ["DcpCheckpointManager"]


class DcpCheckpointManager(BaseCheckpointManager):
    """Checkpoint manager for torchtitan's trainer; replaces torchtitan's `CheckpointManager`, with the same options.

    Both managers have the same format of checkpoints: either can load what the other has saved.

    Args:
        config: Options of the manager; see `DcpCheckpointManager.Config`.
        dataloader: Data loader, whose state is saved for each rank; None if there is none.
        model_parts: Modules of the model, whose states are saved together under the names of their parameters.
        optimizers: Torchtitan's container of the optimizers.
        lr_schedulers: Torchtitan's container of the learning-rate schedulers.
        states: Further states to save, by name; the states above are added to this dict.
        sd_adapter: Adapter of the model's state dict to Hugging Face's safetensors; None if the model has none.
        base_folder: Folder that contains the configured folder.

    Ranks: every rank makes one, and calls the same methods in the same order.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """Options of torchtitan, and `tolerated_failures`.

        `async_mode`: "async" saves in a thread, "async_with_pinned_mem" in a process of its own, from a copy that is
        made while the next step computes.
        """

        tolerated_failures: int = 0
        """Number of saves in a row that may fail because of the storage before the training ends."""

        def __post_init__(self) -> None:
            CheckpointManager.Config.__post_init__(self)
            if self.tolerated_failures < 0:
                raise ValueError(f"tolerated_failures={self.tolerated_failures} must be at least 0")

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        if not self.enable:
            return
        if config.last_save_in_hf and sd_adapter is None:
            raise ValueError(
                "checkpoint.last_save_in_hf needs a model with a state_dict_adapter, and this one has none"
            )
        self.config = config
        self.folder = filesystem.join(base_folder, config.folder)
        self.sd_adapter = sd_adapter
        self.save_future: Future[Any] | None = None
        self.states = states
        self.states[MODEL] = ModelWrapper(model_parts)
        self.states |= {OPTIMIZER: optimizers, DATALOADER: dataloader, LR_SCHEDULER: lr_schedulers}
        self._resources = contextlib.ExitStack()
        self._saver: BackgroundSaver | None = None
        if config.async_mode != "disabled":
            self._saver = BackgroundSaver(config.async_mode, self._resources)
        self._manager = self._resources.enter_context(
            RunManager(
                self.folder,
                keep_policy=KeepLast(config.keep_latest_k) if config.keep_latest_k else None,
                saver=self._saver,
                tolerated_failures=config.tolerated_failures,
            )
        )
        logger.info(f"Checkpoints are loaded from and saved to {self.folder}, by dcp")

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        chosen = self._choose_step(step)
        if chosen is None:
            loaded = self._load_initial()
        else:
            # A seed checkpoint has the model alone.
            state = self._model_state() if chosen == 0 else self._state_to_load()
            restored = self._manager.restore(state, step=None if step == -1 else step)
            self.states[MODEL].load_state_dict(state)
            logger.info(f"Loaded step {chosen if restored is None else restored.step} from {self.folder}")
            loaded = True
        GarbageCollection.collect("after loading a checkpoint")
        return loaded

    def _choose_step(self, asked: int) -> int | None:
        """Return the step to load, the same on all ranks; -1 selects the highest step, or None without checkpoints.

        Raises:
            CheckpointNotFoundError: The requested step has no checkpoint.
        """

        def choose() -> int | None:
            found = self._manager.checkpoints()
            steps = [record.step for record in found]
            if asked not in {-1, *steps}:
                raise CheckpointNotFoundError(
                    f"--checkpoint.load_step={asked} not found: {self.folder} has the steps {steps}; choose one of "
                    "them, or -1 for the latest"
                )
            sound = [record.step for record in found if record.quarantined is None]
            return max(sound or steps, default=None) if asked == -1 else asked

        with make_coordinator(errors=RANK_ERRORS) as ranks:
            return ranks.broadcast("choose a checkpoint", choose)

    def _load_initial(self) -> bool:
        """Load the initial state of a run that has no checkpoint; returns whether an initial state is configured."""
        config, path = self.config, self.config.initial_load_path
        if config.initial_load_in_hf:
            path = path or getattr(self.sd_adapter, "hf_assets_path", None)
            if self.sd_adapter is None or not path:
                raise ValueError(
                    "checkpoint.initial_load_in_hf needs a model with a state_dict_adapter, and a folder: set "
                    "checkpoint.initial_load_path or hf_assets_path"
                )
            quantized = config.initial_load_in_hf_quantized
            state = load_model(self.sd_adapter, self._model_state(), path, quantized=quantized)
        elif path:
            state = self._model_state() if config.initial_load_model_only else self._state_to_load()
            load(state, checkpoint_id=path)
        else:
            logger.info(f"There is no checkpoint in {self.folder}, and no initial_load_path: this is a fresh start")
            return False
        self.states[MODEL].load_state_dict(state)
        logger.info(f"Loaded the initial state from {path}")
        return True

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if not self._is_due(curr_step, last_step=last_step):
            return False
        GarbageCollection.collect("before saving a checkpoint")  # torchtitan has turned off what is automatic
        if last_step:
            self._save_last(curr_step)
            return True
        saved: bool = self._manager.maybe_save(curr_step, lambda: self._whole_state(self.states))
        self.save_future = None if self._saver is None else self._saver.last
        return saved

    def _is_due(self, step: int, *, last_step: bool) -> bool:
        if self.config.load_only:
            return False
        is_first = step == 1 and self.config.enable_first_step_checkpoint
        return is_first or last_step or step % self.config.interval == 0

    def _save_last(self, step: int) -> None:
        """Save the last step (whole state, model alone, or safetensors), and wait until its checkpoint exists."""
        if self.config.last_save_in_hf:
            self._manager.wait()
            export_model(self.sd_adapter, self._exported_model(), self._manager.checkpoint_id(step))
            return
        model_only = self.config.last_save_model_only
        self._manager.save(step, self._exported_model if model_only else lambda: self._whole_state(self.states))
        self._manager.wait()

    def _model_state(self) -> dict[str, Any]:
        return dict(self.states[MODEL].state_dict())

    def _exported_model(self) -> dict[str, Any]:
        """Return the model's state with floating-point tensors in `export_dtype`."""
        dtype = TORCH_DTYPE_MAP[self.config.export_dtype]
        state = self._model_state()
        floating = (name for name, value in state.items() if torch.is_tensor(value) and value.is_floating_point())
        return state | {name: state[name].to(dtype) for name in floating}

    def _whole_state(self, states: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state dict to store: values of the model at the top level, beside the other states by name."""
        return {name: value for name, value in states.items() if name != MODEL} | self._model_state()

    def _state_to_load(self) -> dict[str, Any]:
        excluded = self.config.exclude_from_loading
        unknown = sorted({*excluded} - self.states.keys())
        if unknown:
            raise ValueError(
                f"checkpoint.exclude_from_loading: there is no state {', '.join(unknown)}; there are "
                f"{', '.join(sorted(self.states.keys() - {MODEL}))}"
            )
        return self._whole_state({name: value for name, value in self.states.items() if name not in excluded})

    def _maybe_wait_for_staging(self) -> None:
        if self._saver is not None:
            self._saver.wait_for_copy()

    def _wait_for_saving(self) -> None:
        self.save_future = None
        self._manager.wait()

    def _close(self) -> None:
        # The trainer closes while it handles an error, too: then other ranks may not come here, and it matters more.
        self._resources.__exit__(*sys.exc_info())
