"""Collectives of the pretend device: the backend `pretend`, which is gloo on copies in host memory.

As with NCCL, a group has a stream of its own, and only `Work.wait` lets the current stream follow it. Inputs are read
during the call, because other ranks wait for them: a change before `wait` is not found. Outputs are written late.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import library
from torch.futures import Future
from torch.utils import _pytree as pytree

from integration_tests.devices.pretend.machine import NAME, Event, Stream, machine
from integration_tests.devices.pretend.memory import on_host

__all__ = ["register"]

_OPERATORS = (
    *("_allgather_base_", "_reduce_scatter_base_", "allgather_", "allgather_into_tensor_coalesced_", "allreduce_"),
    *("alltoall_", "alltoall_base_", "barrier", "broadcast_", "gather_", "recv_", "reduce_", "reduce_scatter_"),
    *("reduce_scatter_tensor_coalesced_", "scatter_", "send"),
)
_streams: defaultdict[str, Stream] = defaultdict(lambda: Stream(0))
_not_waited_for: set[_Work] = set()
"""Kept here until `wait`, as PyTorch keeps only the C++ half of such an object."""


def register() -> list[object]:
    """Register the backend; its operators are there as long as what is returned."""
    if not dist.is_available():
        return []
    made: Any = library.Library
    operators = made("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")  # PyTorch's ask the backend
        for name in _OPERATORS:
            operators.impl(name, _collective(getattr(torch.ops.c10d, name).default), "PrivateUse1")
    dist.Backend.register_backend(NAME, dist.ProcessGroupGloo, devices=[NAME])
    return [operators]


class _Work(dist.Work):
    """Work of a group, which keeps its outputs' memory until the current stream follows it."""

    def __init__(self, event: Event, outputs: list[torch.Tensor], *, blocks: bool) -> None:
        super().__init__()
        self._event, self._outputs, self._blocks = event, outputs, blocks
        _not_waited_for.add(self)

    def wait(self, *_: Any) -> bool:
        self._event.wait()
        if self._blocks:
            self._event.synchronize()
        _not_waited_for.discard(self)
        return True

    def is_completed(self) -> bool:
        return self._event.query()

    def get_future(self) -> Any:
        """Return a future that is done: the current stream waits now, not as late as it could."""
        self.wait()
        found: Future[Any] = Future()
        found.set_result(self._outputs)
        return found


def _collective(operator: Any) -> Callable[..., Any]:
    name = operator.name().split("::")[1]
    place = [argument.name for argument in operator._schema.arguments].index("process_group")

    def call(*arguments: Any) -> Any:
        group = dist.ProcessGroup.unbox(arguments[place])
        stream = _streams[group.group_name]
        stream.wait_stream(machine.current_stream(0))
        with torch.no_grad(), torch.get_device_module(NAME).stream(stream):
            host = pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, [*arguments])
        host[place] = _on_host(group)
        answer = operator(*host)
        works = dist.Work.unbox(answer[-1] if isinstance(answer, tuple) else answer)
        outputs = [] if name == "send" else pytree.tree_leaves(arguments[0])
        targets = list(map(on_host, outputs))
        sources = [] if name == "send" else pytree.tree_leaves(host[0])

        def finish() -> None:
            works.wait()
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)

        machine.launch(stream, finish, early=False)
        work = _Work(stream.record_event(), outputs, blocks=name == "barrier").boxed()
        return (arguments[0], work) if len(operator._schema.returns) > 1 else work

    return call


def _on_host(group: Any) -> Any:
    """Return a group whose tensors are in host memory, over the same connections."""
    made: Any = dist.ProcessGroup(group.rank(), group.size())  # type: ignore[call-arg]
    backend = group._get_backend(torch.device(NAME))
    made._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return made.boxed()
