"""The asynchronous savers that are compared, behind one interface. Imports each library only when it takes part."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["SAVERS", "memcpy_of", "saver"]

SAVERS = ("stock process", "stock thread", "ours process", "ours thread", "torch_checkpointing")

State = dict[str, Any]
Saver = Callable[[State, str], "Future[Any]"]


@contextmanager
def saver(name: str, *, warm: State | None = None) -> Iterator[Saver]:
    """A function that starts a save and returns, when values may change, a future of its end."""
    library, _, kind = name.partition(" ")
    if library == "ours":
        with _ours(kind, warm) as save:
            yield save
    elif library == "stock":
        yield _stock(kind)
    else:
        with _torch_checkpointing() as save:
            yield save


@contextmanager
def _ours(kind: str, warm: State | None) -> Iterator[Saver]:
    from dcp_async import AsyncSaver

    with AsyncSaver(kind) as made:
        if warm is not None:
            made.warm_up(state_dict=warm)

        def save(state: State, folder: str) -> Future[Any]:
            future = made.save(state, checkpoint_id=folder)
            assert isinstance(future, Future)
            return future

        told = 0

        def message_bytes() -> int:
            """Sent to the process since the last call."""
            nonlocal told
            before, told = told, getattr(getattr(made.backend, "worker", None), "bytes_sent", 0)
            return told - before

        save.message_bytes = message_bytes  # type: ignore[attr-defined]
        yield save


def _stock(kind: str) -> Saver:
    """With a gloo group of its own for the thread: on the trainer's it hangs. One stager for all saves."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    stager = DefaultStager(StagingOptions(False, kind == "process", False, False))
    group = dist.new_group(backend="gloo") if kind == "thread" else None

    def save(state: State, folder: str) -> Future[Any]:
        found: Any = dcp.async_save(  # type: ignore[attr-defined]
            state,
            checkpoint_id=folder,
            process_group=group,
            async_stager=stager,
            async_checkpointer_type=AsyncCheckpointerType(kind),
        )
        assert isinstance(found, Future)
        return found

    return save


@contextmanager
def _torch_checkpointing() -> Iterator[Saver]:
    """As its defaults are where there is no CUDA, but for `use_direct_io`, which fails on ext4; staging is awaited."""
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.config import AsyncCheckpointSaverConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    manager: Any = CheckpointManager.Config(save=AsyncCheckpointSaverConfig(), storage_config=storage).build()

    def save(state: State, folder: str) -> Future[Any]:
        written: Future[Any] = manager.save(folder, {"state": state})
        manager._staging_future.result()
        return written

    yield save
    manager.close()


def memcpy_of(tensors: list[torch.Tensor], threads: int) -> Callable[[], None]:
    """A copy of these tensors into other memory, by so many threads, as fast as torch copies."""
    pairs = [(torch.zeros_like(tensor), tensor) for tensor in tensors]
    cut = 4 << 20
    pieces = [
        piece
        for target, source in pairs
        for piece in zip(torch.split(target.view(-1), cut), torch.split(source.view(-1), cut), strict=True)
    ]
    pool = ThreadPoolExecutor(threads)

    def run() -> None:
        work, lock = iter(pieces), threading.Lock()

        def drain(_: int) -> None:
            while True:
                with lock:
                    piece = next(work, None)
                if piece is None:
                    return
                piece[0].copy_(piece[1])

        list(pool.map(drain, range(threads)))

    return functools.partial(run)
