"""Crawl through the objects of a training: finds its state by name, whether or not anything saves it.

It goes breadth first, so that the shortest name wins, and calls only `state_dict()` of schedulers and gradient scalers.
"""

from __future__ import annotations

import functools
import random
import re
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Sampler

from dcp_prove.observing.fingerprint import PLAIN

_MAX_DEPTH = 10
_MAX_OBJECTS = 20_000
_MAX_ENTRIES = 1_000
_AVERAGE = re.compile(r"(^|[^a-z])(ema|swa|polyak|teacher|shadow)($|[^a-z])|averag|Ema($|[A-Z])|EMA", re.ASCII)
_OPAQUE_MODULES = (
    *(
        "dcp_async",
        "dcp_core",
        "dcp_fs",
        "dcp_base",
        "dcp_io",
        "dcp_manager",
        "dcp_manifest",
        "dcp_ranks",
        "dcp_state",
    ),
    *("_io", "_thread", "asyncio", "concurrent", "ctypes", "importlib", "inspect", "io", "logging", "multiprocessing"),
    *("pathlib", "queue", "re", "selectors", "socket", "subprocess", "tempfile", "threading", "weakref"),
    *("torch._C", "torch._dynamo", "torch._inductor", "torch.autograd", "torch.distributed"),
    *(f"torch.{device}" for device in ("accelerator", "cuda", "mps", "mtia", "xpu")),
    *("torch.futures", "torch.fx", "torch.jit", "torch.profiler", "torch.utils.data._utils"),
    *("torch.utils.data.dataloader", "torch.utils.hooks", "torch.utils.tensorboard"),
)
_GENERATORS: Mapping[type, Callable[[Any], Any]] = {
    torch.Generator: lambda generator: generator.get_state(),
    np.random.Generator: lambda generator: generator.bit_generator.state,
    np.random.RandomState: lambda generator: generator.get_state(),
    random.Random: lambda generator: generator.getstate(),
}
_OPAQUE = (
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    types.CodeType,
    types.FrameType,
    torch.device,
    torch.dtype,
)


class Crawl:
    """State that can be reached from groups of named objects; an earlier group's name wins.

    Without `full`, only numbers, texts, generators, schedulers and scalers are wanted.
    """

    def __init__(self, *roots: Mapping[str, Any], full: bool) -> None:
        self.found: dict[str, tuple[str, Any]] = {}
        """Name → kind (see `Item.kind`) and value."""
        self.notes: list[str] = []
        self._full = full
        self._seen: dict[int, Any] = {}  # holds the objects, so that no id is used twice
        self._names: dict[int, str] = {}
        self._optimizers: list[tuple[str, torch.optim.Optimizer]] = []
        self._queue: deque[tuple[str, Any, str, int]] = deque()
        for group in roots:
            self._queue.extend((name, value, "", 0) for name, value in group.items())
            while self._queue and len(self._seen) <= _MAX_OBJECTS:
                self._visit(*self._queue.popleft())
        if self._queue:
            self.notes.append(f"only the first {_MAX_OBJECTS:,} objects of the training were looked at")
        for name, optimizer in self._optimizers:
            self._add_optimizer(name, optimizer)

    def _visit(self, name: str, value: Any, role: str, depth: int) -> None:
        if isinstance(value, PLAIN):
            self.found.setdefault(name, (role if role in ("sampler", "epoch") else "value", value))
            return
        if id(value) in self._seen or isinstance(value, _OPAQUE) or depth > _MAX_DEPTH:
            return
        self._seen[id(value)] = value
        if _AVERAGE.search(name.rpartition(".")[2]) or _AVERAGE.search(type(value).__name__):
            role = "average"
        if self._add_leaf(name, value, role):
            return
        if isinstance(value, nn.Module):
            self._add_module(name, value, role)
            if type(value).__module__.startswith("torch."):
                return
        if self._is_opaque(value):
            return
        for inner, child in _children(value, name):
            self._queue.append((inner, child, _role_of(value, inner, role), depth + 1))

    def _add_leaf(self, name: str, value: Any, role: str) -> bool:
        if isinstance(value, (torch.Tensor, np.ndarray)):
            if self._full:
                self.found[name] = (role if role == "average" else "tensor", value)
            return True
        for kind, state_of in _GENERATORS.items():
            if isinstance(value, kind):
                self.found[name] = ("generator", state_of(value))
                return True
        if isinstance(value, np.generic):
            self.found[name] = ("value", value.item())
        elif isinstance(value, LRScheduler) or type(value).__name__.endswith("GradScaler"):
            self._add_states(name, "scheduler" if isinstance(value, LRScheduler) else "scaler", value)
        elif isinstance(value, torch.optim.Optimizer):
            self._optimizers.append((name, value))
        else:
            return False
        return True

    def _add_states(self, name: str, kind: str, value: Any) -> None:
        for key, state in value.state_dict().items():
            self.found[f"{name}.{key}"] = (kind, state)

    def _add_module(self, name: str, module: nn.Module, role: str) -> None:
        averages = [prefix for prefix, part in module.named_modules() if _is_average(prefix, part)]
        norms = {prefix for prefix, part in module.named_modules() if isinstance(part, _NormBase)}
        for prefix, part in module.named_modules():
            self._seen[id(part)] = part
            where = f"{name}.{prefix}" if prefix else name
            own = role == "average" or any(prefix == other or prefix.startswith(f"{other}.") for other in averages)
            self._add_tensors(where, part, kinds=_kinds(is_average=own, is_norm=prefix in norms))
            if prefix and not type(part).__module__.startswith("torch."):
                self._queue.extend((inner, child, role, 1) for inner, child in _children(part, where))

    def _add_tensors(self, where: str, part: nn.Module, kinds: tuple[str, str]) -> None:
        for key, parameter in part.named_parameters(recurse=False):
            self._seen[id(parameter)] = parameter
            self._names.setdefault(id(parameter), f"{where}.{key}")
            if self._full and not isinstance(parameter, nn.parameter.UninitializedParameter):
                self.found.setdefault(f"{where}.{key}", (kinds[0], parameter))
                if parameter.grad is not None:
                    self.found.setdefault(f"{where}.{key}.grad", ("gradient", parameter.grad))
        for key, buffer in part.named_buffers(recurse=False):
            self._seen[id(buffer)] = buffer
            if self._full:
                self.found.setdefault(f"{where}.{key}", (kinds[1], buffer))

    def _add_optimizer(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        for number, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key != "params" and isinstance(value, (*PLAIN, tuple, torch.Tensor)):
                    self.found[f"{name}.param_groups[{number}].{key}"] = ("optimizer", value)
            if not self._full:
                continue
            for place, parameter in enumerate(group["params"]):
                of = self._names.get(id(parameter), f"param_groups[{number}].params[{place}]")
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, (*PLAIN, torch.Tensor)):
                        self.found[f"{name}.state[{of}].{key}"] = ("optimizer", value)

    @staticmethod
    def _is_opaque(value: Any) -> bool:
        if isinstance(value, (DataLoader, nn.Module)):
            return False
        module = type(value).__module__
        return any(module == name or module.startswith(f"{name}.") for name in _OPAQUE_MODULES)


def _kinds(*, is_average: bool, is_norm: bool) -> tuple[str, str]:
    if is_average:
        return "average", "average"
    return "parameter", "batchnorm" if is_norm else "buffer"


def _is_average(prefix: str, part: nn.Module) -> bool:
    return bool(_AVERAGE.search(prefix.rpartition(".")[2]) or _AVERAGE.search(type(part).__name__))


def _role_of(owner: Any, name: str, role: str) -> str:
    if name.endswith(".epoch") and (isinstance(owner, Sampler) or hasattr(type(owner), "set_epoch")):
        return "epoch"
    return "sampler" if isinstance(owner, Sampler) else role


def _children(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (Mapping, list, tuple, deque)):
        entries = value.items() if isinstance(value, Mapping) else enumerate(value)
        if len(value) <= _MAX_ENTRIES:
            yield from ((f"{name}[{key!r}]", inner) for key, inner in [*entries])
    elif isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
        yield from _bound(value, name)
    elif isinstance(value, types.GeneratorType):
        variables = {} if value.gi_frame is None else value.gi_frame.f_locals
        yield from ((f"{name}.{key}", inner) for key, inner in variables.items())
    elif isinstance(value, DataLoader):
        for key in ("sampler", "batch_sampler", "dataset", "generator"):
            yield f"{name}.{key}", getattr(value, key, None)
    else:
        yield from _attributes(value, name)


def _bound(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, functools.partial):
        yield f"{name}.func", value.func
        yield f"{name}.args", value.args
        yield f"{name}.keywords", value.keywords
    elif isinstance(value, types.MethodType):
        yield name, value.__self__
        yield from _cells(value.__func__, name)
    else:
        yield from _cells(value, name)


def _cells(function: Any, name: str) -> Iterator[tuple[str, Any]]:
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    for key, cell in zip(names, getattr(function, "__closure__", None) or (), strict=False):
        try:
            yield f"{name}.{key}", cell.cell_contents
        except ValueError:  # not bound yet
            continue


def _attributes(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    held = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for key in (slots,) if isinstance(slots, str) else slots:
            with_default = getattr(value, key, None) if isinstance(key, str) and not key.startswith("__") else None
            held.setdefault(key, with_default)
    if isinstance(value, nn.Module):
        own = vars(nn.Module())
        held = {key: inner for key, inner in held.items() if key not in own}
    yield from ((f"{name}.{key}", inner) for key, inner in held.items())
