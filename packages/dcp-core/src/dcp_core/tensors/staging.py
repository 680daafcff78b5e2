"""`AsyncStager`, the contract of stagers, and `BlockingAsyncStager`, which copies to host memory before it returns.

Stagers that copy during training are in `dcp_async`. `BlockingAsyncStager` is in this package because the file storage
writer derives from it, as in stock.

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
    """Contract of a stager, which copies a state dict to host memory, so that training may change the original."""

    _synchronize_after_execute: bool = True

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Whether the saver must call `synchronize_staging` after `stage`, to wait for the copy."""
        return self._synchronize_after_execute

    def stage(self, state_dict: dict[str, Any]) -> Future[dict[str, Any]] | dict[str, Any]:
        """Return a copy of `state_dict` in host memory, or a future of the copy.

        The caller may change the tensors of `state_dict` once the copy is complete.
        """
        ...

    def synchronize_staging(self) -> None:
        """Wait until the copy of the last `stage` call is complete. Deprecated: let `stage` return a future instead."""
        ...

    def close(self) -> None:
        """Release the host memory that the stager holds for copies."""
        ...


class BlockingAsyncStager:
    """Stager that copies all tensors to CPU memory before `stage` returns.

    Args:
        cache_staged_state_dict: Whether the next call of `stage` reuses the copied tensors and so overwrites them. Only
            for callers that finish a save before they call `stage` again.
        type_check: Whether to raise for objects that cannot be copied safely, instead of returning them uncopied.

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
        """Whether `synchronize_staging` must be called after `stage`: always False."""
        return self._synchronize_after_execute

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a complete copy of a state dict: tensors in CPU memory, new containers; objects are not copied."""
        staged: dict[str, Any] = _copy(state_dict, self.state_dict_cache, type_check=self.type_check)
        if self.cache_staged_state_dict:
            self.state_dict_cache = staged
        return staged

    def synchronize_staging(self) -> None:
        """Do nothing, because the copy is complete when `stage` returns."""

    def close(self) -> None:
        """Release the memory of the copies that `cache_staged_state_dict` keeps."""
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
    """Return the dict `items` converted to the type of `template`; unchanged if that type does not accept a dict."""
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
