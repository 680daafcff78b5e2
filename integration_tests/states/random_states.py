"""Random state dicts of what a checkpoint can hold, the same for a seed on every run; and what a load gives back.

Not here: quantized tensors, which need a template.
"""

from __future__ import annotations

import collections
import datetime as dt
import math
import pathlib
import random
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from integration_tests.oracle.kinds import DTYPES, bits, filled

__all__ = ["loaded", "random_state", "random_view"]

_MAX_DEPTH = 4
_LARGE_ELEMENTS = 70_000
"""Of tensors that are written in several blocks, and copied piece by piece where they are not contiguous."""


class Tagged(torch.Tensor):
    """An ordinary subclass, as metric and weight wrappers make."""


class OwnParameter(torch.nn.Parameter):
    """A parameter with an attribute of its own, as frameworks make."""

    tag = "own"


def random_state(seed: int, mesh: DeviceMesh | None = None) -> dict[str, Any]:
    """A nested state dict.

    Args:
        seed: Decides on everything.
        mesh: Of one rank, for DTensors; None for none of them.
    """
    return _Maker(seed, mesh).mapping(0)


def loaded(value: Any) -> Any:
    """What a load without a template gives for a value: mappings as dicts, tensors plain, whole and on the CPU."""
    if isinstance(value, DTensor):
        return value.full_tensor().detach()
    if isinstance(value, torch.Tensor):
        return value.detach().as_subclass(torch.Tensor)
    if isinstance(value, dict):
        return {key: loaded(item) for key, item in value.items()}
    return [loaded(item) for item in value] if type(value) is list else value


def random_view(base: torch.Tensor, draw: random.Random, steps: int = 3) -> torch.Tensor:
    """A view of a tensor: sliced, turned, expanded, conjugated, negated, of another width, overlapping itself."""
    for _ in range(draw.randrange(steps + 1)):
        made = draw.choice(_VIEWS)(base, draw)
        base = base if made is None else made
    return base


def _narrowed(base: torch.Tensor, draw: random.Random) -> torch.Tensor | None:
    if not base.dim():
        return None
    dim = draw.randrange(base.dim())
    start = draw.randint(0, base.size(dim))
    return base.narrow(dim, start, draw.randint(0, base.size(dim) - start))


def _stepped(base: torch.Tensor, draw: random.Random) -> torch.Tensor | None:
    return base[:: draw.randint(2, 3)] if base.dim() else None


def _expanded(base: torch.Tensor, draw: random.Random) -> torch.Tensor | None:
    return base.unsqueeze(0).expand(draw.randint(0, 3), *base.shape) if base.dim() < 4 else None


def _overlapping(base: torch.Tensor, draw: random.Random) -> torch.Tensor | None:
    """Windows that share elements."""
    if base.dim() != 1 or base.numel() < 4 or not base.is_contiguous():
        return None
    return base.as_strided((base.numel() - 2, 2), (1, draw.choice([1, 2])), base.storage_offset())


def _conjugated(base: torch.Tensor, draw: random.Random) -> torch.Tensor | None:
    # torch cannot resolve a conjugated half complex on the CPU.
    return base.conj() if base.is_complex() and base.dtype is not torch.complex32 else None


def _imaginary(base: torch.Tensor, draw: random.Random) -> torch.Tensor | None:
    conjugated = _conjugated(base, draw)
    return None if conjugated is None else draw.choice([base, conjugated]).imag


def _real(base: torch.Tensor, draw: random.Random) -> torch.Tensor | None:
    return base.real if base.is_complex() and not base.is_conj() else None


def _negated(base: torch.Tensor, draw: random.Random) -> torch.Tensor | None:
    return torch._neg_view(base) if base.dtype in (torch.float32, torch.float64, torch.bfloat16) else None


def _as_bytes(base: torch.Tensor, draw: random.Random) -> torch.Tensor | None:
    plain = base.is_contiguous() and base.dim() and base.stride(-1) == 1
    return base.view(torch.uint8) if plain and not (base.is_conj() or base.is_neg()) else None


def _turned(base: torch.Tensor, draw: random.Random) -> torch.Tensor:
    return base.permute(draw.sample(range(base.dim()), base.dim()))


def _picked(base: torch.Tensor, draw: random.Random) -> torch.Tensor | None:
    return base.select(0, draw.randrange(base.size(0))) if base.dim() and base.size(0) else None


_VIEWS: list[Callable[[torch.Tensor, random.Random], torch.Tensor | None]] = [
    _narrowed, _stepped, _turned, _expanded, _overlapping, _conjugated, _imaginary, _real, _negated, _as_bytes, _picked,
    lambda base, _: base.unsqueeze(-1), lambda base, _: base.diagonal() if base.dim() > 1 else None,
]  # fmt: skip


class _Maker:
    """Draws the values of one state."""

    def __init__(self, seed: int, mesh: DeviceMesh | None) -> None:
        self._draw = random.Random(seed)
        self._mesh = mesh
        self._names = iter(range(10**6))
        self._tensors: list[torch.Tensor] = []

    def mapping(self, depth: int) -> dict[Any, Any]:
        """A dict; below the top also an ordered or an empty one."""
        kind = dict if depth == 0 else self._draw.choice([dict, dict, collections.OrderedDict])
        return kind((self._key(), self._value(depth + 1)) for _ in range(self._draw.randint(2 * (depth == 0), 6)))

    def _key(self) -> Any:
        number = next(self._names)
        text = self._draw.choice(["w", "a.b", "layer", "", " ", "ü", "\n", "..", "x/y"])
        return number if self._draw.random() < 0.2 else f"{text}{number}"

    def _value(self, depth: int) -> Any:
        luck = self._draw.random()
        if luck < 0.25 and depth < _MAX_DEPTH:
            return self.mapping(depth)
        if luck < 0.35 and depth < _MAX_DEPTH:
            return [self._value(depth + 1) for _ in range(self._draw.randint(0, 4))]
        return self._tensor() if luck < 0.75 else self._object(depth)

    def _tensor(self) -> torch.Tensor:
        luck = self._draw.random()
        if self._tensors and luck < 0.15:  # tied, or another view of the same memory
            return random_view(self._draw.choice(self._tensors), self._draw, self._draw.choice([0, 2]))
        made = self._memory()
        if type(made) is torch.Tensor and luck < 0.7:
            made = random_view(made, self._draw)
        self._tensors.append(made) if type(made) is torch.Tensor else None
        return self._dressed(made)

    def _memory(self) -> torch.Tensor:
        luck = self._draw.random()
        if luck < 0.04:
            return bits(self._draw.randint(1, 9), self._draw.randrange(99)).view(torch.float4_e2m1fn_x2)
        dtype = self._draw.choice(DTYPES)
        large = luck > 0.96
        shape = (_LARGE_ELEMENTS,) if large else tuple(self._draw.choices(range(6), k=self._draw.randrange(4)))
        return filled(shape, dtype, self._draw.randrange(99))

    def _dressed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, or something made of it that is saved as it would be."""
        learns = (tensor.is_floating_point() and tensor.dtype.itemsize > 1) or tensor.is_complex()
        luck = self._draw.random()
        if luck < 0.6:
            return tensor
        if luck < 0.75:
            return self._draw.choice([torch.nn.Parameter, OwnParameter])(tensor, requires_grad=learns)
        if luck < 0.8:
            return tensor.as_subclass(Tagged)
        if self._mesh is None or tensor.is_conj() or tensor.is_neg():
            return tensor.detach().requires_grad_(learns)
        placement = Shard(self._draw.randrange(tensor.dim())) if tensor.dim() else Replicate()
        return DTensor.from_local(tensor, self._mesh, [placement], run_check=False)

    def _object(self, depth: int) -> Any:
        draw = self._draw
        if draw.random() < 0.25 and depth < _MAX_DEPTH:
            return tuple(draw.choice([self._object(depth + 1), filled((2,), draw.choice(DTYPES), 1)]) for _ in "123")
        return draw.choice(_OBJECTS)


def _float(pattern: int) -> float:
    return float(struct.unpack("<d", struct.pack("<Q", pattern))[0])


_ZONE = dt.timezone(dt.timedelta(hours=-3, minutes=30))
_OBJECTS: list[Any] = [
    0, 1, -1, 2**31, -(2**63), 2**70, True, False, None, 0.0, -0.0, 1.0, 0.1, 5e-324, math.inf, -math.inf, math.nan,
    _float(0x7FF8000000000001), _float(0xFFF8000000000000), 0j, complex(-0.0, -0.0), complex(math.nan, math.inf),
    1 + 0j, "", "text", "1", "ü\n\x00", "\U0001f600", b"", b"1", b"\x00\xff" * 50, "long " * 20_000, (),
    (1, True, 1.0, "1", b"1"), (0.0, (-0.0, [0, False])), [1, 2.0, "three"], [], {1, 2}, frozenset({"a"}),
    bytearray(b"1"), range(3), slice(1, None), dt.datetime(2026, 1, 2, 3, 4, 5, 6),  # noqa: DTZ001
    dt.datetime(2026, 1, 2, tzinfo=dt.timezone.utc), dt.datetime(2026, 1, 2, tzinfo=_ZONE), dt.date(2026, 1, 2),
    dt.timedelta(days=-1, microseconds=1), pathlib.PurePosixPath("a/b"), torch.Size((2, 3)), torch.bfloat16,
    collections.Counter("aab"), np.float64(-0.0), np.float32(0.1), np.int64(1), np.bool_(True), np.uint8(255),
    np.complex64(1j), np.float16(1), np.arange(6, dtype=np.int16).reshape(2, 3), np.array([0.0, -0.0, math.nan]),
    np.zeros((0, 3)), np.array(1.5), np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.arange(10)[::3],
    np.array(["a", "bc"]), np.array([b"a"]), np.random.RandomState(3).get_state(), np.arange(30_000.0),
]  # fmt: skip
