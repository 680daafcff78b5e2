"""`DcpCheckpointManager`: torchtitan's checkpoint manager, implemented with `dcp_manager`.

Source: torchtitan 0.3 `components/checkpointer` (`BaseCheckpointManager`, options, names of folders and states).
"""

from __future__ import annotations

import contextlib
import os
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

from dcp_async import AsyncSaver, DefaultStager, StagingOptions
from dcp_core import CheckpointNotFoundError, load, save
from dcp_format import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
    QuantizedHuggingFaceStorageReader,
    consolidate_safetensors_files_on_every_rank,
)
from dcp_manager import CheckpointManager as RunManager
from dcp_manager import KeepLast
from dcp_manager.background import future_of
from dcp_ranks import make_coordinator


class DcpCheckpointManager(BaseCheckpointManager):
    """Replaces torchtitan's `CheckpointManager`; each manager loads the other's checkpoints.

    Arguments are torchtitan's; `states` also receives the model, optimizers, schedulers and data loader.

    Ranks: every rank creates one, and calls the same methods in the same order.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """torchtitan's options, and `tolerated_failures`.

        `async_mode`: "async" saves in a thread; "async_with_pinned_mem" saves in a process, from a copy made during the
        next step.
        """

        tolerated_failures: int = 0
        """Number of consecutive saves that may fail in storage before training ends."""

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
        self._saver: _BackgroundSaver | None = None
        if config.async_mode != "disabled":
            self._saver = _BackgroundSaver(config.async_mode, self._resources)
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
            # A seed checkpoint has only the model.
            state = self._model_state() if chosen == 0 else self._state_to_load()
            restored = self._manager.restore(state, step=None if step == -1 else step)
            self.states[MODEL].load_state_dict(state)
            logger.info(f"Loaded step {chosen if restored is None else restored.step} from {self.folder}")
            loaded = True
        GarbageCollection.collect("after loading a checkpoint")
        return loaded

    def _choose_step(self, asked: int) -> int | None:
        def choose() -> int | None:
            steps = [record.step for record in self._manager.checkpoints()]
            if asked not in {-1, *steps}:
                raise CheckpointNotFoundError(
                    f"--checkpoint.load_step={asked} not found: {self.folder} has the steps {steps}; choose one of "
                    "them, or -1 for the latest"
                )
            if asked != -1:
                return asked
            newest = self._manager.latest()  # else a damaged one, of which the load says what is wrong
            return max(steps, default=None) if newest is None else newest

        with make_coordinator() as ranks:
            return ranks.broadcast("choose a checkpoint", choose)

    def _load_initial(self) -> bool:
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
        GarbageCollection.collect("before saving a checkpoint")  # torchtitan disables automatic collection
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
        dtype = TORCH_DTYPE_MAP[self.config.export_dtype]
        state = self._model_state()
        floating = (name for name, value in state.items() if torch.is_tensor(value) and value.is_floating_point())
        return state | {name: state[name].to(dtype) for name in floating}

    def _whole_state(self, states: Mapping[str, Any]) -> dict[str, Any]:
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
        # The trainer also closes while handling an error, which matters more, and other ranks may not arrive here.
        self._resources.__exit__(*sys.exc_info())


_PINNED = "async_with_pinned_mem"


class _BackgroundSaver:
    """Saver in a thread (`async`) or process (`async_with_pinned_mem`).

    A process's state is copied during the next step: call `wait_for_copy` before parameters change.
    """

    def __init__(self, mode: str, resources: contextlib.ExitStack) -> None:
        """Closing `resources` closes the saver."""
        self._stager: DefaultStager | None = None
        if mode == _PINNED:
            self._stager = DefaultStager(StagingOptions(use_async_staging=True))
            resources.callback(self._stager.close)
        self._saver = resources.enter_context(AsyncSaver("process" if mode == _PINNED else "thread"))
        self._copy: Future[Any] | None = None
        self.last: Future[Any] | None = None
        """Done when its checkpoint exists."""

    def save(self, state_dict: dict[str, Any], **arguments: Any) -> Any:
        answer: Any = self._saver.save(state_dict, async_stager=self._stager, **arguments)
        self._copy = getattr(answer, "staging_completion", None)
        self.last = future_of(answer)
        return answer

    def wait_for_copy(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.result()


_PARTS = "sharded"
_THREADS = 4


def load_model(adapter: Any, model_state: dict[str, Any], path: str, *, quantized: bool) -> dict[str, Any]:
    """Load a model's state dict from safetensors; tensors of the template `model_state` may be filled in place.

    `quantized` dequantizes tensors stored in blocks with scales.

    Ranks: every rank; collective.
    """
    tensors = adapter.to_hf(model_state)
    load(tensors, storage_reader=_reader(adapter, path, quantized=quantized))
    loaded: dict[str, Any] = adapter.from_hf(tensors)
    return loaded


def export_model(adapter: Any, model_state: dict[str, Any], folder: str) -> None:
    """Export a model's state as safetensors, into the files that the model's index names, or one.

    Ranks write parts into the directory `sharded`, and then join them.

    Ranks: every rank; collective.
    """
    tensors = adapter.to_hf(model_state)
    files = adapter.fqn_to_index_mapping
    if not files:
        save(tensors, storage_writer=HuggingFaceStorageWriter(folder, save_distributed=True, enable_consolidation=True))
        return
    parts = os.path.join(folder, _PARTS)
    save(tensors, storage_writer=HuggingFaceStorageWriter(parts, fqn_to_index_mapping=files, save_distributed=True))
    consolidate_safetensors_files_on_every_rank(parts, folder, files, num_threads=_THREADS)


def _reader(adapter: Any, path: str, *, quantized: bool) -> HuggingFaceStorageReader:
    theirs: Any = adapter.get_hf_storage_reader(path, True) if quantized else None
    if not hasattr(theirs, "block_size"):
        return HuggingFaceStorageReader(path, thread_count=_THREADS)
    return QuantizedHuggingFaceStorageReader(
        path, thread_count=_THREADS, target_dtype=theirs.target_dtype, block_size=theirs.block_size
    )
