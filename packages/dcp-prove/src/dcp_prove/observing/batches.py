"""Watch of the batches that a training reads, from data loaders and as inputs of its models."""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.utils.data import dataloader

from dcp_prove.observing.fingerprint import PLAIN, fingerprint


class BatchWatch:
    """Watch of all data loaders and models in this process, from `start` until the process ends.

    Of several batches that are read before one forward call, the last counts: a resumed run may skip some.
    `before_forward` is called before the outermost forward call of a module in training mode.
    """

    def __init__(self, before_forward: Callable[[], None] | None = None) -> None:
        self._before_forward = before_forward
        self._waiting: list[tuple[str, list[Any]]] = []
        self._batches: list[tuple[str, list[Any]]] = []
        self._inputs: list[str] = []
        self._iterators = 0
        self._workers = 0
        self._drawn: dict[int, deque[Any]] = {}
        self._depth = threading.local()

    def start(self) -> None:
        """Begin to watch."""
        self._watch_loaders(dataloader._BaseDataLoaderIter)  # noqa: SLF001 - torch has no hook for it
        hooks.register_module_forward_pre_hook(self._before)
        hooks.register_module_forward_hook(self._after, always_call=True)

    def take(self) -> tuple[list[str], list[Any], int, int]:
        """Return batches (or else inputs), sample ids, new iterators and workers since the last call."""
        read = self._batches or self._waiting
        ids = [each for _, samples in read for each in samples]
        found = [digest for digest, _ in read] or self._inputs, ids, self._iterators, self._workers
        self._batches, self._waiting, self._inputs, self._iterators = [], [], [], 0
        return found

    def forget_trained(self) -> None:
        """Forget batches that a forward call has used, which an interrupted step does not read again."""
        self._batches, self._inputs = [], []

    def _watch_loaders(self, kind: Any) -> None:
        init, draw, following = kind.__init__, kind._next_index, kind.__next__  # noqa: SLF001
        watch = self

        def make(self: Any, *args: Any, **options: Any) -> None:
            watch._drawn[id(self)] = deque()
            watch._iterators += 1
            init(self, *args, **options)

        def next_index(self: Any) -> Any:
            index = draw(self)
            watch._drawn.setdefault(id(self), deque()).append(index)
            return index

        def next_batch(self: Any) -> Any:
            batch = following(self)
            drawn = watch._drawn.get(id(self))
            watch._note(batch, drawn.popleft() if drawn else None, self._num_workers)
            return batch

        kind.__init__, kind._next_index, kind.__next__ = make, next_index, next_batch  # noqa: SLF001

    def _note(self, batch: Any, index: Any, workers: int) -> None:
        self._waiting.append((fingerprint(list(_tensors(batch))), _ids_of(index)))
        self._workers = workers

    def _before(self, module: nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling():  # the compiler traces hooks
            return
        depth = getattr(self._depth, "value", 0)
        self._depth.value = depth + 1
        if depth:
            return
        if module.training and torch.is_grad_enabled():
            if self._before_forward is not None:
                self._before_forward()
            self._batches += self._waiting[-1:]
            self._waiting = []
            self._inputs.append(fingerprint(list(_tensors(inputs))))

    def _after(self, module: nn.Module, inputs: Any, output: Any) -> None:  # noqa: ARG002 - the hook's signature
        if not torch.compiler.is_compiling():
            self._depth.value = max(getattr(self._depth, "value", 1) - 1, 0)


def _ids_of(index: Any) -> list[Any]:
    indices = getattr(index, "indices", None)
    ids = indices if isinstance(indices, list) else index if isinstance(index, (list, tuple)) else [index]
    known = [int(each) for each in ids if hasattr(each, "__index__")]
    return known if getattr(index, "lanes", None) is None else [f"{index.epoch}/{position}" for position in known]


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors(inner)
    elif isinstance(value, (torch.Tensor, np.ndarray, *PLAIN)):
        yield value
    elif dataclasses.is_dataclass(value):
        yield from _tensors(vars(value))
