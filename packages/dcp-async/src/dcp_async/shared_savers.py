"""`async_save`, with stock's signature: saves through asynchronous savers that are shared by all calls in a process.

Source: torch 2.13 `torch.distributed.checkpoint.state_dict_saver.async_save` (signature, results).
"""

from __future__ import annotations

import atexit
import os
import threading
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist

from dcp_async.options import AsyncCheckpointerType, Overlap, SaverOptions, saver_name
from dcp_async.queue.jobs import AsyncSaveResponse
from dcp_async.saver import AsyncSaver
from dcp_core import AsyncStager, Metadata, SavePlanner, StorageWriter
from dcp_core.toolkit import CheckpointId, without_positional_path

__all__ = ["async_save", "close_savers", "shared_saver"]

_savers: dict[str, AsyncSaver] = {}
_lock = threading.Lock()


@without_positional_path
def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: CheckpointId | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    async_stager: AsyncStager | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    overlap: Overlap = "wait",
) -> Future[Metadata] | AsyncSaveResponse:
    """Copy a state dict and save the copy in the background, through this process's shared saver.

    For other options, or for more than one saver, make an `AsyncSaver`. The interpreter completes running saves before
    it exits.

    Args:
        state_dict: State dict to save; its tensors may be changed as soon as `async_save` returns, without
            `async_stager`.
        checkpoint_id: Path or URI of the checkpoint.
        storage_writer: Storage writer to use instead of the one that the scheme of `checkpoint_id` selects.
        planner: Save planner that decides which rank writes which item; see `AsyncSaver.save`.
        process_group: Process group of the ranks that save together; None for all ranks.
        async_checkpointer_type: Whether the save runs in a thread or in a worker process.
        async_stager: Stager that copies the state dict; None for the storage writer if it is a stager, else for the
            saver's stager.
        no_dist: Whether to save from this process alone.
        use_collectives: Whether ranks plan together; with False, every rank plans alone.
        overlap: Policy of this save while an earlier save runs: `wait` for the earlier save, `skip` this save, or let
            it replace a queued save (`latest`). The future of a skipped or replaced save raises.

    Returns:
        Future of the checkpoint's metadata, done when the checkpoint is published; with a stager that returns futures,
        an `AsyncSaveResponse`, which has a second future for the copy.

    Raises:
        Exception: Any error that `AsyncSaver.save` raises.

    Ranks: every rank of the group; does not wait for other ranks, only for this rank's own earlier saves if the
        policy is `wait`.

    Example:
        ```python
        import torch
        from dcp_async import async_save

        weights = torch.ones(1000)
        future = async_save({"weights": weights}, checkpoint_id="step-1")
        weights.zero_()  # training goes on; the saved values are the ones
        future.result()  # raises if the save failed
        ```
    """
    return shared_saver(async_checkpointer_type).save(
        state_dict,
        checkpoint_id=checkpoint_id,
        storage_writer=storage_writer,
        planner=planner,
        process_group=process_group,
        async_stager=async_stager,
        no_dist=no_dist,
        use_collectives=use_collectives,
        overlap=overlap,
    )


def shared_saver(
    kind: AsyncCheckpointerType | str = AsyncCheckpointerType.PROCESS, options: SaverOptions | None = None
) -> AsyncSaver:
    """Return the `AsyncSaver` that `async_save` uses, for its methods `warm_up`, `lock`, `wait` and `close`.

    Args:
        kind: Type of the saver, or the name of a saver from a plug-in.
        options: Options for a saver that does not exist yet; None for the defaults of `SaverOptions`, or for the
            options of the saver that exists.

    Raises:
        ValueError: The saver already exists with other options; close it first.
    """
    name = saver_name(kind)
    with _lock:
        saver = _savers.get(name)
        if saver is None or saver.closed:
            saver = _savers[name] = AsyncSaver(kind, options=options)
        elif options is not None and options != saver.options:
            raise ValueError(f"the {name} saver is in use with other options; call close_savers() first")
        return saver


def close_savers() -> None:
    """Close all shared savers of `async_save`, see `AsyncSaver.close`. The next `async_save` makes a new saver."""
    with _lock:
        savers = [*_savers.values()]
        _savers.clear()
    for saver in savers:
        saver.close()


def _at_exit() -> None:
    """Close shared savers at the interpreter's exit; their saves have ended, since Python joins threads first.

    Log unread errors.
    """
    for saver in _savers.values():
        saver.log_unasked()
        saver.end()


def _forget_in_child() -> None:
    """Drop the shared savers in a forked child, which has neither their threads nor the one that holds the lock."""
    global _lock  # noqa: PLW0603 - there is one for the process
    _lock = threading.Lock()
    for saver in _savers.values():
        saver.end()
    _savers.clear()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_forget_in_child)
