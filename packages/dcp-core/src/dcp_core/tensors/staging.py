"""`AsyncStager`, the contract of stagers, and `BlockingAsyncStager`.

Source: torch 2.13 `torch.distributed.checkpoint.staging`.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol, runtime_checkable

import torch

from dcp_core.tensors.kinds import children_of, described_like, is_dtensor, rebuilt, with_local
from dcp_core.tensors.tensor_memory import copy_elements, copy_to_cpu


@runtime_checkable
class AsyncStager(Protocol):
    """Copies a state dict to host memory, so that training may change the original."""

    _synchronize_after_execute: bool = True

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Whether the saver must call `synchronize_staging` after `stage`."""
        return self._synchronize_after_execute

    def stage(self, state_dict: dict[str, Any]) -> Future[dict[str, Any]] | dict[str, Any]:
        """Return a copy in host memory, or its future; the original may change once it is complete."""
        raise NotImplementedError(f"{type(self).__name__} must implement stage method")

    def synchronize_staging(self) -> None:
        """Wait until the last `stage` has copied. Deprecated: let `stage` return a future instead."""
        ...

    def close(self) -> None:
        """Release the host memory for copies."""
        ...


class BlockingAsyncStager:
    """Copies all tensors to CPU memory before `stage` returns.

    ```python
    import torch
    from dcp_core import BlockingAsyncStager

    weights = torch.ones(3)
    copy = BlockingAsyncStager().stage({"weights": weights})
    weights.zero_()
    assert copy["weights"].tolist() == [1, 1, 1]
    ```

    Args:
        cache_staged_state_dict: Whether the next `stage` reuses and overwrites the copied tensors. Finish each save
            before calling `stage` again.
        type_check: Whether to raise for objects that cannot be copied safely.
    """

    _synchronize_after_execute: bool = False

    def __init__(self, cache_staged_state_dict: bool = False, type_check: bool = False) -> None:
        self.cache_staged_state_dict = cache_staged_state_dict
        self.type_check = type_check
        self.state_dict_cache: dict[str, Any] | None = None

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Always False."""
        return self._synchronize_after_execute

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return copied tensors in new containers; objects are not copied."""
        staged: dict[str, Any] = _copy(state_dict, self.state_dict_cache, type_check=self.type_check)
        if self.cache_staged_state_dict:
            self.state_dict_cache = staged
        return staged

    def synchronize_staging(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Release the cached copies."""
        self.state_dict_cache = None


def _copy(value: Any, cached: Any, *, type_check: bool) -> Any:
    if is_dtensor(value):
        old = cached.to_local() if is_dtensor(cached) else None
        local = value._local_tensor  # noqa: SLF001 - the view from to_local() lacks this tensor's attributes
        return with_local(value, described_like(local, _copy_tensor(value.to_local().detach(), old)))
    if isinstance(value, torch.Tensor):
        return described_like(value, _copy_tensor(value.detach(), cached))
    if isinstance(value, dict):
        old_items = cached if isinstance(cached, dict) else {}
        return type_like(
            value, {key: _copy(item, old_items.get(key), type_check=type_check) for key, item in value.items()}
        )
    children = children_of(value)
    if children is not None:
        before = children_of(cached) or () if type(cached) is type(value) else ()
        olds = [old for _, old in before] if len(before) == len(children) else [None] * len(children)
        items = [_copy(item, old, type_check=type_check) for (_, item), old in zip(children, olds, strict=True)]
        return rebuilt(value, items)
    if type_check and not isinstance(value, int | float | str | bytes | bool | type(None)):
        raise TypeError(f"a value of type {type(value).__qualname__} cannot be staged with type_check=True")
    return value


def type_like(template: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """Convert `items` to the template's type, if that accepts a dict."""
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
