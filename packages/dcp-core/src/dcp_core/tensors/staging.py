"""The stager contract, and the simplest stager: a blocking copy to host memory.

Stagers that overlap with training are in `dcp_async`; this one is here because stock's file writer is itself a stager,
and so is the file writer of this library.

Source: torch 2.13 `torch.distributed.checkpoint.staging`.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol, runtime_checkable

import torch

from dcp_core.tensors.dtensors import is_dtensor
from dcp_core.tensors.element_copy import copy_elements, copy_to_cpu

__all__ = ["AsyncStager", "BlockingAsyncStager"]


@runtime_checkable
class AsyncStager(Protocol):
    """Copies a state dict to memory that training does not touch, so that it can be saved in the background."""

    _synchronize_after_execute: bool = True

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Whether `synchronize_staging` must be called once the save has been handed over."""
        return self._synchronize_after_execute

    def stage(self, state_dict: dict[str, Any]) -> Future[dict[str, Any]] | dict[str, Any]:
        """Return a copy of `state_dict` on the host, or a future of it; then the caller may change the source."""
        ...

    def synchronize_staging(self) -> None:
        """Wait until the last `stage` is done. Deprecated: return a future from `stage` instead."""
        ...

    def close(self) -> None:
        """Release the memory that the stager holds."""
        ...


class BlockingAsyncStager:
    """Stages by copying every tensor to CPU memory before `stage` returns.

    Args:
        cache_staged_state_dict: Whether to keep the copies, and write into them at the next call. The result of one
            call is then overwritten by the next: only for callers that finish a save before they stage again.
        type_check: Whether to raise on values that cannot be copied safely, instead of passing them through.

    Example:
        ```python
        import torch
        from dcp_core import BlockingAsyncStager

        weights = torch.ones(3)
        copy = BlockingAsyncStager().stage({"weights": weights})
        weights.zero_()
        assert copy["weights"].tolist() == [1, 1, 1]
        ```
    """

    _synchronize_after_execute: bool = False

    def __init__(self, cache_staged_state_dict: bool = False, type_check: bool = False) -> None:
        self.cache_staged_state_dict = cache_staged_state_dict
        self.type_check = type_check
        self.state_dict_cache: dict[str, Any] | None = None

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Always False: nothing is left to wait for."""
        return self._synchronize_after_execute

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy `state_dict` to CPU memory, complete on return; containers are new, other values are shared."""
        staged: dict[str, Any] = _copy(state_dict, self.state_dict_cache, type_check=self.type_check)
        if self.cache_staged_state_dict:
            self.state_dict_cache = staged
        return staged

    def synchronize_staging(self) -> None:
        """Return at once: there is nothing to wait for."""

    def close(self) -> None:
        """Drop the cached copies."""
        self.state_dict_cache = None


def _copy(value: Any, cached: Any, *, type_check: bool) -> Any:
    if is_dtensor(value):
        from torch.distributed.tensor import DTensor  # noqa: PLC0415 - imported long since, as there is one

        old = cached.to_local() if is_dtensor(cached) else None
        # from_local would move the copy back to the mesh's device; the constructor takes the memory as it is.
        local = _copy_tensor(value.to_local().detach(), old)
        return DTensor(local, value._spec, requires_grad=False)  # type: ignore[no-untyped-call]  # noqa: SLF001
    if isinstance(value, torch.Tensor):
        return _copy_tensor(value.detach(), cached)
    if isinstance(value, dict):
        old_items = cached if isinstance(cached, dict) else {}
        return type_like(
            value, {key: _copy(item, old_items.get(key), type_check=type_check) for key, item in value.items()}
        )
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        olds = cached if isinstance(cached, list | tuple) and len(cached) == len(value) else [None] * len(value)
        return type(value)(_copy(item, old, type_check=type_check) for item, old in zip(value, olds, strict=True))
    if type_check and not isinstance(value, int | float | str | bytes | bool | type(None)):
        raise TypeError(f"a value of type {type(value).__qualname__} cannot be staged with type_check=True")
    return value


def type_like(template: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """Return `items` in a dict of the template's type if that type can be made from a dict, else in a plain dict."""
    if type(template) is dict:
        return items
    try:
        return type(template)(items)
    except TypeError:
        return items


def _copy_tensor(source: torch.Tensor, cached: object) -> torch.Tensor:
    if (
        isinstance(cached, torch.Tensor)
        and cached.shape == source.shape
        and cached.dtype == source.dtype
        and cached.layout == source.layout
    ):
        copy_elements(cached, source)
        return cached
    return copy_to_cpu(source)
