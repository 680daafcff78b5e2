"""Contract of a trainer for `prove_resume`, and its check."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch

__all__ = ["StepResult", "Trainer", "check_trainer", "read_step"]

StepResult = Any
"""What `Trainer.step` returns: the loss as a number or a tensor of one element; or a mapping with `loss`, and `samples`
if the ids of the step's samples on this rank are known; or None."""


class Trainer(Protocol):
    """A training that can be stepped, saved and restored.

    `prove_resume` looks at its state from outside: at everything that can be reached through the attributes of the
    object. Hold model, optimizer, scheduler, loader and so on as attributes, or in objects, containers or closures that
    are attributes.

    Example:
        ```python
        import torch
        from dcp_core import load, save


        class Fit:
            def __init__(self, root):
                torch.manual_seed(0)
                self.root = root
                self.model = torch.nn.Linear(4, 1)
                self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

            def step(self):
                loss = self.model(torch.ones(2, 4)).square().mean()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                return loss

            def state(self):
                return {"model": self.model, "optimizer": self.optimizer}

            def save(self):
                save(self.state(), checkpoint_id=f"{self.root}/checkpoint")

            def restore(self):
                load(self.state(), checkpoint_id=f"{self.root}/checkpoint")
        ```
    """

    def step(self) -> StepResult:
        """Train one step (of a loop that accumulates gradients, one backward pass), and return its loss.

        Ranks: every rank.
        """
        ...

    def save(self) -> None:
        """Save a checkpoint of the state after the last step, which is durable when this returns.

        Ranks: every rank.
        """
        ...

    def restore(self) -> None:
        """Restore the newest checkpoint; called at most once, on a new trainer, before its first step.

        Ranks: every rank.
        """
        ...


def check_trainer(trainer: Any) -> None:
    """Check that an object has the methods of a `Trainer`.

    Raises:
        TypeError: A method is missing.
    """
    missing = [name for name in ("step", "save", "restore") if not callable(getattr(trainer, name, None))]
    if missing:
        raise TypeError(
            f"make_trainer returned a {type(trainer).__name__} without {', '.join(f'{name}()' for name in missing)}; "
            "a trainer has step(), which trains one step and returns its loss, save() and restore()"
        )


def read_step(result: Any) -> tuple[float | None, list[Any] | None]:
    """Return the loss and the sample ids of a step's result; None for what it does not have.

    Raises:
        TypeError: The result is nothing that a step may return.
    """
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
