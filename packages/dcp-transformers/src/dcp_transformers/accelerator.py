"""Save and load everything that an `Accelerator` has prepared and registered, on any world size."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torch import nn

from dcp_core import Metadata, PerRank, load, save
from dcp_manager.background import Saver, future_of
from dcp_state import RandomState, app_state
from dcp_transformers.export import describe_model, is_peft


def save_state(
    accelerator: Any, checkpoint_id: str | os.PathLike[str], *, saver: Saver | None = None, **values: Any
) -> Future[Metadata] | None:
    """Save what `accelerator.save_state` saves, sharded like the model, each tensor once, published in one step.

    That is: prepared models, optimizers and schedulers, the scaler, stateful data loaders' positions, seeded samplers'
    epochs, registered objects, and every rank's random states.

    Args:
        accelerator: The `accelerate.Accelerator`.
        checkpoint_id: Directory, or URI of an installed storage.
        saver: Background saver, such as `dcp_async.AsyncSaver("process")`; None blocks.
        values: Further values by name, such as a step; see `dcp_state.app_state`.

    Returns:
        A future, done when the checkpoint exists; None without a saver.

    Raises:
        ValueError, TypeError: No model was prepared, or the name of a value is taken.
        CheckpointException, OSError, …: See `dcp_core.save`.

    Ranks: every rank; collective.
    Source: accelerate 1.15 `Accelerator.save_state`, `checkpointing.save_accelerator_state`.
    """
    state = _state(accelerator, values)
    if accelerator.is_main_process:
        state |= describe_model(accelerator.unwrap_model(accelerator._models[0], keep_torch_compile=False))
    if saver is not None:
        return future_of(saver.save(state, checkpoint_id=checkpoint_id, process_group=None, no_dist=False))
    save(state, checkpoint_id=checkpoint_id)
    return None


def load_state(accelerator: Any, checkpoint_id: str | os.PathLike[str], **values: Any) -> dict[str, Any]:
    """Load a checkpoint of `save_state` into the prepared and registered objects, on any number of processes.

    Pass the same `values`, of the same types; they are returned by name. Errors are those of `dcp_core.load`.

    Ranks: every rank; collective.
    Source: accelerate 1.15 `Accelerator.load_state`.
    """
    state = _state(accelerator, values)
    load(state, checkpoint_id=checkpoint_id)
    accelerator.step = state["app"]["accelerator_step"]
    return {name: state["app"][name] for name in values}


def _state(accelerator: Any, values: dict[str, Any]) -> dict[str, Any]:
    models: Sequence[nn.Module] = accelerator._models
    if not models:
        raise ValueError("the accelerator has no model; pass it to accelerator.prepare(…) first")
    own: dict[str, Any] = {
        "scheduler": accelerator._schedulers or None,
        "accelerator_step": accelerator.step,
        "random": PerRank(RandomState()),
        "loaders": PerRank(_Loaders(accelerator._dataloaders), otherwise="modulo"),
    }
    own |= {} if accelerator.scaler is None else {"scaler": accelerator.scaler}
    own |= {f"custom_{number}": each for number, each in enumerate(accelerator._custom_objects)}
    model = models[0] if len(models) == 1 else nn.ModuleList(models)
    trainable_only = True if any(is_peft(accelerator.unwrap_model(each)) for each in models) else None
    app = app_state(model, accelerator._optimizers or None, trainable_only=trainable_only, **values, **own)
    return {"app": app}


@dataclass
class _Loaders:
    _loaders: Sequence[Any]

    def state_dict(self) -> dict[str, Any]:
        return {"positions": list(map(_position, self._loaders))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for loader, (epoch, seed, state) in zip(self._loaders, state_dict["positions"], strict=False):
            loader.iteration = epoch
            if seed is not None and hasattr(_sampler(loader), "initial_seed"):
                _sampler(loader).initial_seed = seed
            if state is not None and getattr(loader, "use_stateful_dataloader", False):
                loader.load_state_dict(state)


def _position(loader: Any) -> tuple[int, int | None, dict[str, Any] | None]:
    state = loader.state_dict() if getattr(loader, "use_stateful_dataloader", False) else None
    return getattr(loader, "iteration", 0), getattr(_sampler(loader), "initial_seed", None), state


def _sampler(loader: Any) -> Any:
    batches = getattr(loader, "batch_sampler", None)
    return getattr(
        getattr(batches, "batch_sampler", batches), "sampler", None
    )  # a rank's batch sampler contains the sampler of all ranks
