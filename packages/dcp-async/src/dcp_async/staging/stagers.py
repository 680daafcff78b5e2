"""Stagers with stock's class names, for `async_save` or to copy state dicts to host memory.

Source: torch 2.13 `torch.distributed.checkpoint.{staging,_state_dict_stager}` (names and meanings).
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from dcp_async.options import SaverOptions
from dcp_async.staging.arenas import ArenaPool
from dcp_async.staging.copy_state import Copier, Stager
from dcp_core import BlockingAsyncStager
from dcp_core.tensors.devices import on_this_stream


@dataclass
class StagingOptions:
    """Options of `DefaultStager`. Options about CUDA do nothing without CUDA.

    Attributes:
        use_pinned_memory: Whether copies are in pinned memory.
        use_shared_memory: Whether copies are in memory that another process can map.
        use_async_staging: Whether `stage` copies in a thread and returns a future.
        use_non_blocking_copy: No effect, accepted as in stock: copies from devices always run on separate streams.

    Example:
        ```python
        from dcp_async import DefaultStager, StagingOptions

        stager = DefaultStager(StagingOptions(use_async_staging=False))
        copy = stager.stage({"step": 1})
        stager.close()
        ```
    """

    use_pinned_memory: bool = True
    use_shared_memory: bool = True
    use_async_staging: bool = True
    use_non_blocking_copy: bool = True


class DefaultStager:
    """Stager that copies state dicts to host memory, which is reused once all tensors of a copy are deleted.

    Tensors that share a storage share it in the copy. `AsyncSaver.save` uses only this stager's option
    `use_async_staging`, and copies into the saver's own memory.

    Example:
        ```python
        import torch
        from dcp_async import DefaultStager

        stager = DefaultStager()
        weights = torch.ones(3)
        copying = stager.stage({"weights": weights})  # a future; with `use_async_staging=False` the copy itself
        assert copying.result()["weights"].tolist() == [1, 1, 1]
        stager.close()
        ```
    """

    _synchronize_after_execute: bool = False

    def __init__(self, config: StagingOptions | None = None) -> None:
        self.config = config or StagingOptions()
        pinned, shared = self.config.use_pinned_memory, self.config.use_shared_memory
        pool = ArenaPool(shared=shared, pinned=pinned, until_dropped=True)
        self._stager = Stager(pool, Copier(SaverOptions().copy_threads))
        self._thread: ThreadPoolExecutor | None = None
        self._last: Future[dict[str, Any]] | None = None

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Whether `synchronize_staging` must be called after `stage`: always False."""
        return self._synchronize_after_execute

    def stage(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any] | Future[dict[str, Any]]:
        """Copy a state dict to host memory, with deep copies of containers and objects.

        Returns:
            The copy, or with `use_async_staging` a future of it, before which tensors of `state_dict` must not change.
        """
        del kwargs  # stock's take none either
        if not self.config.use_async_staging:
            return self._copy(state_dict)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="dcp-stager")
        self._last = self._thread.submit(on_this_stream(lambda: self._copy(state_dict)))
        return self._last

    def synchronize_staging(self) -> None:
        """Wait until the copy of the last `stage` call is complete."""
        if self._last is not None:
            self._last.exception()

    def close(self) -> None:
        """Wait for a copy in progress; release the memory once no copied tensor is referenced."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        self._stager.copier.close()
        self._stager.pool.close()

    def _copy(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        staged, arena = self._stager.stage_as_it_is(state_dict)
        self._stager.pool.give_back(arena)  # free once the copies are gone
        return staged


class StateDictStager:
    """Stager that copies state dicts to host memory synchronously, like `DefaultStager` without a thread.

    Args:
        pin_memory: Whether copies are in pinned memory, if the accelerator has any.
        share_memory: Whether copies are in memory that another process can map.
        pin_memory_min_bytes: No effect, accepted as in stock: all tensors of a copy are in one allocation.

    Example:
        ```python
        import torch
        from dcp_async import StateDictStager

        stager = StateDictStager()
        weights = torch.ones(3)
        copy = stager.stage({"weights": weights})
        weights.zero_()
        assert copy["weights"].tolist() == [1, 1, 1]
        stager.close()
        ```
    """

    def __init__(self, pin_memory: bool = False, share_memory: bool = False, pin_memory_min_bytes: int = 5) -> None:
        del pin_memory_min_bytes
        self._stager = DefaultStager(StagingOptions(pin_memory, share_memory, use_async_staging=False))

    def stage(self, state_dict: Any, non_blocking: bool = False) -> Any:
        """Copy a state dict to host memory and return the copy, which is complete even with `non_blocking`."""
        del non_blocking
        return self._stager.stage(state_dict)

    def close(self) -> None:
        """Release the memory once no copied tensor is referenced."""
        self._stager.close()


def is_plain_blocking(stager: object) -> bool:
    """Return whether a stager is a `BlockingAsyncStager` that only copies; a saver may copy instead."""
    steps = ("stage", "synchronize_staging", "should_synchronize_after_execute", "_synchronize_after_execute")
    if not isinstance(stager, BlockingAsyncStager) or any(
        getattr(type(stager), step) is not getattr(BlockingAsyncStager, step) for step in steps
    ):
        return False
    return not (stager.cache_staged_state_dict or stager.type_check)
