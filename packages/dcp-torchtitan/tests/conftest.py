"""What the tests here have in common: they need torchtitan, which `nox -s frameworks` installs."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

with warnings.catch_warnings(), contextlib.suppress(ModuleNotFoundError):  # where it is missing, tests are skipped
    warnings.simplefilter("ignore")  # of what it imports
    import torchtitan.trainer  # noqa: F401


class Value:
    """A state of one value, in place of torchtitan's containers."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]


@pytest.fixture
def make_manager(tmp_path: Path) -> Callable[..., Any]:
    """Return a function that makes a manager of a class and options, for a model whose weights are all `value`."""

    def make(kind: Any, *, value: float = 0.0, adapter: Any = None, **options: Any) -> Any:
        model = torch.nn.Linear(3, 2)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
        config = kind.Config(**{"enable": True, "interval": 1, "folder": "checkpoint", "keep_latest_k": 0, **options})
        return config.build(
            dataloader=Value("data"),
            model_parts=[model],
            optimizers=Value(torch.full((4,), value)),
            lr_schedulers=Value(value),
            states={"train_state": Value(int(value))},
            sd_adapter=adapter,
            base_folder=str(tmp_path),
        )

    return make
