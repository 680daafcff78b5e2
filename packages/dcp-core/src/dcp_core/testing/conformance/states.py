"""State dicts and templates of the conformance suite, compared bit by bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from dcp_core.errors import DcpError
from dcp_core.planning.save_planner import DefaultSavePlanner
from dcp_core.records.protocols import WriteItem

__all__ = ["VALUES", "FailingPlanner", "blank", "random_state", "state"]

_DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.int16,
    torch.uint8, torch.bool, torch.float8_e4m3fn,
)  # fmt: skip


def _filled(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    count = torch.Size(shape).numel()
    draw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=_generator(seed))
    return draw.gt(127).reshape(shape) if dtype is torch.bool else draw.view(dtype).reshape(shape)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _tied() -> dict[str, torch.Tensor]:
    table = _filled(5, 4)
    return {"embedding": table, "head": table}


VALUES: dict[str, Callable[[], Any]] = {
    **{str(dtype).removeprefix("torch."): functools.partial(_filled, 5, 3, dtype=dtype) for dtype in _DTYPES},
    "scalar": lambda: torch.tensor(2.5),
    "empty": lambda: torch.empty(0, 4),
    "large": lambda: _filled(1 << 20, seed=1),
    "transposed": lambda: _filled(40, 30).t(),
    "strided": lambda: _filled(64, 6)[::3, 1:4],
    "parameter": lambda: torch.nn.Parameter(torch.arange(6.0).reshape(2, 3)),
    "tied": _tied,
    "many": lambda: {f"layer.{number}": _filled(number % 7, seed=number) for number in range(60)},
    "nested": lambda: {"a": [_filled(2), {"b": (_filled(1), 3)}], "0": {"": torch.ones(1)}},
    "plain-objects": lambda: {"step": 7, "name": "größe", "none": None, "list": [1, (2.5, True)], "blob": b"\0\xff"},
    "only-an-object": lambda: "text",
}


def blank(value: Any) -> Any:
    """Return a template of the same structure."""
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype)
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(blank(item) for item in value)
    return None


def state(value: float) -> dict[str, Any]:
    """Return a small state dict filled with `value`."""
    return {
        "large": torch.full((300, 1000), value),
        "small": torch.tensor(value),
        "bytes": torch.full((7,), int(value) % 256, dtype=torch.uint8),
        "object": {"value": value},
    }


def random_state(seed: int = 0) -> dict[str, Any]:
    """Return a state dict of random bytes."""
    return {"large": _filled(300, 1000, seed=seed), "small": _filled(9, 7, seed=seed + 1), "object": {"seed": seed}}


class FailingPlanner(DefaultSavePlanner):
    """Save planner that raises, or calls `action`, at the data of FQN `key`."""

    def __init__(self, key: str = "small", action: Callable[[], object] | None = None) -> None:
        super().__init__()
        self._key = key
        self._action = action

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.index.fqn == self._key:
            if self._action is None:
                raise DcpError("this save is meant to fail")
            self._action()
        return super().resolve_data(write_item)
