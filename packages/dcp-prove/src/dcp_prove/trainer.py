"""Contract of a trainer for `prove_resume`, and its check."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch

StepResult = Any
"""Result of `Trainer.step`: the loss as a number or a tensor of one element; or a mapping with `loss`, and `samples` if
the ids of the step's samples on this rank are known; or None.
"""


class Trainer(Protocol):
    """A training that can be stepped, saved and restored; `docs/prove-a-resume.md` has a complete one.

    `prove_resume` looks at everything that can be reached through the attributes of the object. Hold model, optimizer,
    scheduler, loader and so on as attributes, or in objects, containers or closures that are attributes.
    """

    def step(self) -> StepResult:
        """Train one step (when accumulating gradients, one backward pass), and return its loss. On every rank."""
        ...

    def save(self) -> None:
        """Save a checkpoint of the state after the last step, durable on return. On every rank."""
        ...

    def restore(self) -> None:
        """Restore the newest checkpoint, at most once, on a new trainer, before its first step. On every rank."""
        ...


def check_trainer(trainer: Any) -> None:
    """Raise TypeError if an object lacks a method of a `Trainer`."""
    missing = [name for name in ("step", "save", "restore") if not callable(getattr(trainer, name, None))]
    if missing:
        raise TypeError(
            f"make_trainer returned a {type(trainer).__name__} without {', '.join(f'{name}()' for name in missing)}; "
            "a trainer has step(), which trains one step and returns its loss, save() and restore()"
        )


def read_step(result: Any) -> tuple[float | None, list[Any] | None]:
    """Return the loss and sample ids of a step's result, None where missing, or raise TypeError."""
    samples = None
    if isinstance(result, Mapping):
        samples = result.get("samples")
        result = result.get("loss")
    try:
        result = result.detach() if isinstance(result, torch.Tensor) else result
        loss = None if result is None else float(result)
        ids = None if samples is None else [_plain(each) for each in samples]
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"step() returned {result!r} ({error}); it returns a loss (a number or a tensor of one element), a mapping "
            "with 'loss' and 'samples', or None"
        ) from error
    return loss, ids


def _plain(sample: Any) -> Any:
    if isinstance(sample, (str, int)):
        return sample
    if isinstance(sample, (tuple, list)):
        return [_plain(each) for each in sample]
    value = float(sample)
    return int(value) if math.isfinite(value) and value == int(value) else value
