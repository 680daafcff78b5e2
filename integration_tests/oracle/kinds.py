"""Every kind of value that a checkpoint can hold, with the same content on every world size.

A `Kind` makes the value to save on each rank, templates to load into (sharded as saved, or otherwise), and says
whether what was loaded is right, bit by bit. Both libraries get the same values.
"""

from __future__ import annotations

import collections
import datetime as dt
import math
import pathlib
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from dcp_core.testing.sharding import distribute

__all__ = ["KINDS", "Kind", "filled", "mesh_of", "same_bits", "zeros"]

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.complex128, torch.complex64, torch.complex32,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.bool,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip


def bits(count: int, seed: int) -> torch.Tensor:
    """Reproducible bytes."""
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8))


def filled(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """A tensor of any bit patterns of its dtype, NaNs and denormals included."""
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    if dtype is torch.bool:
        return bits(math.prod(shape), seed).gt(127).reshape(shape)
    return bits(math.prod(shape) * dtype.itemsize, seed).view(dtype).reshape(shape)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The elements as bytes, row-major."""
    plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    if plain.is_quantized:
        return plain.int_repr().numpy().tobytes() + repr((plain.q_scale(), plain.q_zero_point())).encode()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def local_parts(value: Any) -> list[torch.Tensor]:
    """The local tensors of a ShardedTensor or a LocalShardsWrapper."""
    return [
        getattr(part, "tensor", part) if not isinstance(part, torch.Tensor) else part for part in value.local_shards()
    ]


def same_bits(actual: Any, wanted: Any) -> bool:
    """Equality of nested values by type and bits; tensors by shape, dtype and bits; DTensors by their local parts."""
    if isinstance(wanted, DTensor):
        return isinstance(actual, DTensor) and same_bits(actual.to_local(), wanted.to_local())
    if hasattr(wanted, "local_shards"):
        return same_bits(local_parts(actual), local_parts(wanted))
    if isinstance(wanted, torch.Tensor):
        return (
            isinstance(actual, torch.Tensor)
            and actual.dtype == wanted.dtype
            and actual.shape == wanted.shape
            and raw_bytes(actual) == raw_bytes(wanted)
        )
    if isinstance(wanted, dict):
        return (
            isinstance(actual, dict)
            and list(map(repr, actual)) == list(map(repr, wanted))
            and all(same_bits(actual[key], wanted[key]) for key in wanted)
        )
    if isinstance(wanted, list | tuple):
        return (
            type(actual) is type(wanted)
            and len(actual) == len(wanted)
            and all(same_bits(a, b) for a, b in zip(actual, wanted, strict=True))
        )
    return type(actual) is type(wanted) and _plain_bits(actual) == _plain_bits(wanted)


def _plain_bits(value: Any) -> Any:
    """What is equal for plain values of one type only if they have the same bits: 0.0 is not -0.0, NaN is itself."""
    if isinstance(value, np.ndarray | np.generic):
        elements = list(map(_plain_bits, value.ravel().tolist())) if value.dtype.hasobject else value.tobytes()
        return value.dtype, value.shape, elements
    if isinstance(value, float | complex):
        return struct.pack("<2d", value.real, value.imag)
    return repr(value) if isinstance(value, dt.datetime) else value


@dataclass(frozen=True)
class Kind:
    """One kind of value.

    `make(sharding)` gives the value to save on this rank; `sharding` is `same` or `other`. `blank(value)` gives a
    template of that sharding with other contents. `stock` says what stock can do with it.
    """

    name: str
    make: Callable[[str], Any]
    blank: Callable[[Any], Any]
    stock_saves: bool = True
    stock_loads: bool = True


def zeros(value: Any) -> Any:  # noqa: PLR0911 - one line a kind
    """A template: the same structure with other contents, views and strides not kept."""
    if isinstance(value, DTensor):
        # from_local cannot express a scalar on a rank outside the mesh.
        return DTensor(zeros(value.to_local()), value._spec, requires_grad=False)
    if isinstance(value, torch.Tensor):
        if value.is_quantized:
            return torch.quantize_per_tensor(
                torch.zeros(value.shape), value.q_scale(), value.q_zero_point(), value.dtype
            )
        if value.dtype is torch.bool or value.numel() == 0:
            return torch.zeros(value.shape, dtype=value.dtype)
        return (
            torch.zeros(value.numel() * value.dtype.itemsize, dtype=torch.uint8).view(value.dtype).reshape(value.shape)
        )
    if isinstance(value, dict):
        return type(value)((key, zeros(item)) for key, item in value.items())
    if isinstance(value, list):
        return [zeros(item) for item in value]
    return None if not isinstance(value, tuple) else tuple(None for _ in value)


def _plain(make: Callable[[], Any]) -> Callable[[str], Any]:
    return lambda _: make()


_meshes: dict[tuple[int, tuple[int, ...]], DeviceMesh] = {}


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    """The mesh of that shape over the first ranks; one for all tests, as each makes groups and threads of its own."""
    key = (id(dist.group.WORLD), shape)
    if key not in _meshes:
        names = tuple("abcd"[: len(shape)])
        _meshes[key] = DeviceMesh("cpu", torch.arange(math.prod(shape)).reshape(shape), mesh_dim_names=names)
    return _meshes[key]


def _distributed(
    shape: tuple[int, ...],
    same: tuple[Placement, ...],
    other: tuple[Placement, ...],
    *,
    dtype: torch.dtype = torch.float32,
) -> Callable[[str], Any]:
    """A DTensor; the mesh is one-dimensional, or 2 × (world / 2) for two placements on four ranks."""

    def make(sharding: str) -> Any:
        placements = same if sharding == "same" else other
        world = dist.get_world_size()
        mesh_shape = (world,) if len(placements) == 1 else (2, world // 2) if world > 1 else (1, 1)
        return distribute(filled(shape, dtype), mesh_of(mesh_shape), placements)

    return make


def _strided(sharding: str) -> Any:
    """What FSDP2 over tensor parallel makes: one dimension split by both, in the order of the inner one first."""
    world = dist.get_world_size()
    full = filled((13, 6))
    if sharding == "other":
        return distribute(full, mesh_of((world,)), (Shard(1),))
    mesh = mesh_of((2, world // 2) if world > 1 else (1, 1))
    placements = (_StridedShard(0, split_factor=mesh.size(1)), Shard(0))
    return distribute(full, mesh, placements)


def _on_sub_mesh(sharding: str) -> Any:
    """A DTensor that only the first half of the ranks hold."""
    world = dist.get_world_size()
    mesh = mesh_of((max(1, world // 2),) if sharding == "same" else (world,))
    if mesh.get_coordinate() is None:
        return DTensor.from_local(
            torch.empty(0), mesh, (Shard(0),), run_check=False, shape=torch.Size((6, 4)), stride=(4, 1)
        )
    return distribute(filled((6, 4)), mesh, (Shard(0),))


def _sharded_tensor(sharding: str) -> Any:
    from torch.distributed._shard.sharded_tensor import Shard as OldShard
    from torch.distributed._shard.sharded_tensor import init_from_local_shards

    world, rank = dist.get_world_size(), dist.get_rank()
    full = filled((8, 12))
    dim = 0 if sharding == "same" else 1
    step = full.size(dim) // world
    local = full.narrow(dim, rank * step, step).contiguous()
    offsets = [rank * step, 0] if dim == 0 else [0, rank * step]
    shard = OldShard.from_tensor_and_offsets(local, offsets, rank)
    return init_from_local_shards([shard], *full.shape)


def _zeros_sharded(value: Any) -> Any:
    for shard in value.local_shards():
        shard.tensor.zero_()
    return value


def _local_shards(sharding: str) -> Any:
    """Two shards of each rank in one LocalShardsWrapper; its module imports stock."""
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

    world, rank = dist.get_world_size(), dist.get_rank()
    full = filled((16, 16))
    step = 8 // world
    starts = (rank * step, 8 + rank * step)
    dim = 0 if sharding == "same" else 1
    parts = [full.narrow(dim, start, step).contiguous() for start in starts]
    offsets = [(start, 0) if dim == 0 else (0, start) for start in starts]
    wrapper = LocalShardsWrapper(parts, offsets)
    return DTensor.from_local(
        wrapper, mesh_of((world,)), (Shard(dim),), run_check=False, shape=full.size(), stride=full.stride()
    )


def _zeros_local(value: Any) -> Any:
    for part in value.to_local().local_shards():
        part.zero_()
    return value


def _quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.arange(12.0).reshape(3, 4), 0.1, 3, torch.qint8)


def _tied() -> dict[str, torch.Tensor]:
    table = filled((5, 4))
    return {"embedding": table, "head": table, "other": filled((5, 4), seed=1)}


def _views() -> dict[str, torch.Tensor]:
    base = filled((64, 8))
    return {
        "rows": base[3:9],
        "columns": base[:, 2:5],
        "step": base[::7],
        "turned": base.t(),
        "wide": base[0].expand(3, 8),
    }


def _channels_last() -> torch.Tensor:
    return filled((2, 3, 4, 5)).to(memory_format=torch.channels_last)


def _objects() -> dict[str, Any]:
    return {
        "step": 7, "lr": 1e-3, "name": "run", "flag": True, "nothing": None, "pair": (1, "two"), "primes": [2, 3, 5],
        "tags": {"a": [1, {"b": 2.5}]}, "blob": b"\x00\xff", "shape": torch.Size((2, 3)), "dtype": torch.bfloat16,
        "ordered": collections.OrderedDict(x=1),
    }  # fmt: skip


def _trainer_objects() -> dict[str, Any]:
    return {
        "numpy": np.arange(6, dtype=np.float32).reshape(2, 3), "scalar": np.float64(0.1),
        "rng": np.random.RandomState(3).get_state(),
        "when": dt.datetime(2026, 1, 2, tzinfo=dt.timezone.utc), "took": dt.timedelta(seconds=3),
        "path": pathlib.PurePosixPath("a/b"),
    }  # fmt: skip


def _nested() -> dict[str, Any]:
    return {
        "model": {"0": {"weight": filled((3, 4))}, "list": [filled((2,)), {"x": 1}, [filled((1,), seed=2)]]},
        "opt": {
            "state": {"w": {"step": torch.tensor(3.0), "m": filled((3, 4), seed=3)}},
            "groups": [{"lr": 0.1, "ids": [0, 1]}],
        },
    }


KINDS: list[Kind] = [
    *(
        Kind(f"dtype-{str(dtype).removeprefix('torch.')}", _plain(lambda dtype=dtype: filled((5, 3), dtype)), zeros)
        for dtype in DTYPES
    ),
    Kind("float4", _plain(lambda: bits(6, 0).view(torch.float4_e2m1fn_x2)), zeros, stock_loads=False),
    Kind("quantized", _plain(_quantized), zeros),
    Kind("scalar", _plain(lambda: torch.tensor(3.5)), zeros),
    Kind("empty", _plain(lambda: torch.empty(0, 4)), zeros),
    Kind("parameter", _plain(lambda: torch.nn.Parameter(filled((3, 2)))), lambda p: torch.nn.Parameter(zeros(p.data))),
    Kind("views", _plain(_views), zeros),
    Kind("channels-last", _plain(_channels_last), zeros),
    Kind("conjugate", _plain(lambda: filled((3, 2), torch.complex64).conj()), zeros),
    Kind("tied", _plain(_tied), zeros),
    Kind("objects", _plain(_objects), zeros),
    Kind("trainer-objects", _plain(_trainer_objects), zeros),
    Kind("nested", _plain(_nested), zeros),
    Kind("shard-rows", _distributed((8, 6), (Shard(0),), (Shard(1),)), zeros),
    Kind("shard-uneven", _distributed((5, 7), (Shard(0),), (Shard(1),)), zeros),
    Kind("shard-empty-ranks", _distributed((2, 5), (Shard(0),), (Shard(1),)), zeros),
    Kind("shard-empty-tensor", _distributed((0, 5), (Shard(0),), (Replicate(),)), zeros),
    Kind("shard-3d", _distributed((3, 6, 5), (Shard(1),), (Shard(2),), dtype=torch.bfloat16), zeros),
    Kind("replicate", _distributed((4, 3), (Replicate(),), (Shard(0),)), zeros),
    Kind("mesh-shard-shard", _distributed((6, 9), (Shard(0), Shard(1)), (Shard(1), Replicate())), zeros),
    Kind("mesh-hybrid", _distributed((7, 4), (Replicate(), Shard(0)), (Shard(0), Shard(0))), zeros),
    Kind("strided-shard", _strided, zeros, stock_saves=False, stock_loads=False),
    Kind("sub-mesh", _on_sub_mesh, zeros),
    Kind("sharded-tensor", _sharded_tensor, _zeros_sharded),
    Kind("local-shards", _local_shards, _zeros_local),
]  # fmt: skip
