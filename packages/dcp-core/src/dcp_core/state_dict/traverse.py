"""Traversal of the leaves of a nested state dict, with stock's function names.

Source: torch 2.13 `torch.distributed.checkpoint._traverse`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from dcp_core.state_dict.flatten import Path, flatten
from dcp_manifest.index.columns import PathElement

__all__ = ["print_tensor", "traverse_state_dict"]


def traverse_state_dict(
    state_dict: Mapping[str, Any],
    visitor: Callable[[Path, Any], None],
    keep_traversing: Callable[[object], bool] | None = None,
) -> None:
    """Call `visitor(path, leaf)` for each leaf of a nested state dict, with the same paths as `flatten`.

    Args:
        state_dict: Nested mappings and lists; not changed.
        visitor: Function that is called with each path (str elements for dict keys, int elements for list positions)
            and leaf.
        keep_traversing: Function that returns whether a list is traversed, or is one leaf; None for the rule of
            `flatten`.
    """
    if keep_traversing is None:
        flat = flatten(state_dict)
        for name, value in flat.values.items():
            visitor(flat.paths[name], value)
        return
    for key, value in state_dict.items():
        _visit((str(key),), value, visitor, keep_traversing)


def _visit(
    path: tuple[PathElement, ...],
    value: Any,
    visitor: Callable[[Path, Any], None],
    keep_traversing: Callable[[object], bool],
) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            _visit((*path, str(key)), item, visitor, keep_traversing)
    elif isinstance(value, list) and keep_traversing(value):
        for position, item in enumerate(value):
            _visit((*path, position), item, visitor, keep_traversing)
    else:
        visitor(path, value)


def print_tensor(path: Path, value: object, print_fun: Callable[[str], None] = print) -> None:
    """Print one line for a leaf of a state dict: its path, and for a tensor its shape and dtype."""
    if isinstance(value, torch.Tensor):
        print_fun(f"{path}: {type(value).__name__} {tuple(value.shape)} {value.dtype}")
    else:
        print_fun(f"{path}: {type(value).__name__} {value!r}")
