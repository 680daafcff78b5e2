"""Stagers with stock's names, for callers that stage state dicts themselves or pass a stager to `async_save`.

Source: torch 2.13 `torch.distributed.checkpoint.{staging,_state_dict_stager}` (names and meanings).
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from dcp_async.options import SaverOptions
from dcp_async.staging.arena import ArenaPool
from dcp_async.staging.copy_state import Stager
from dcp_async.staging.copying import Copier, on_this_stream
from dcp_core import BlockingAsyncStager

__all__ = ["DefaultStager", "StagingOptions", "StateDictStager", "is_plain_blocking"]


@dataclass
class StagingOptions:
    """Options of `DefaultStager`. Options about CUDA have no effect without CUDA.

    Attributes:
        use_pinned_memory: Whether to copy into pinned memory.
        use_shared_memory: Whether to copy into memory that another process can map.
        use_async_staging: Whether `stage` copies in a thread and returns a future.
        use_non_blocking_copy: Accepted as in stock, without effect: CUDA tensors are always copied on separate streams.

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
    """Stager that copies state dicts into host memory, which is reused when an earlier copy's tensors are released.

    Storages that tensors share are copied once, and views stay views. A saver that gets this
    stager copies into its own memory, and uses only the option `use_async_staging`.

    Args:
        config: See `StagingOptions`.

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
        """Return False: the result of `stage` tells when the copy is complete."""
        return self._synchronize_after_execute

    def stage(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any] | Future[dict[str, Any]]:
        """Copy a state dict to host memory; returns the complete copy, or with `use_async_staging` its future.

        Containers and objects are deep copies. Values may change again once the copy is complete.
        """
        del kwargs  # stock's take none either
        if not self.config.use_async_staging:
            return self._copy(state_dict)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="dcp-stager")
        self._last = self._thread.submit(on_this_stream(lambda: self._copy(state_dict)))
        return self._last

    def synchronize_staging(self) -> None:
        """Wait until the last `stage` is done."""
        if self._last is not None:
            self._last.exception()

    def close(self) -> None:
        """Wait for the copy in progress, and release the memory once no tensor of it is referenced."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        self._stager.copier.close()
        self._stager.pool.close()

    def _copy(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        staged, arena = self._stager.stage_as_it_is(state_dict)
        self._stager.pool.give_back(arena)  # free once the copies are gone
        return staged


class StateDictStager:
    """Stager that copies synchronously; `DefaultStager` without a thread.

    Args:
        pin_memory: Whether to copy into pinned memory, if CUDA is available.
        share_memory: Whether to copy into memory that another process can map.
        pin_memory_min_bytes: No effect: all copies are in one allocation.

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
        """Copy a state dict to host memory; the copy is complete on return, even with `non_blocking`."""
        del non_blocking
        return self._stager.stage(state_dict)

    def close(self) -> None:
        """Release the memory once no tensor of it is referenced."""
        self._stager.close()


def is_plain_blocking(stager: object) -> bool:
    """Whether a stager only copies, as `BlockingAsyncStager` does by default."""
    steps = ("stage", "synchronize_staging", "should_synchronize_after_execute", "_synchronize_after_execute")
    if not isinstance(stager, BlockingAsyncStager) or any(
        getattr(type(stager), step) is not getattr(BlockingAsyncStager, step) for step in steps
    ):
        return False
    return not (stager.cache_staged_state_dict or stager.type_check)
