"""Quantized tensors, whole and in shards, through every saver: integers, scales and zero points come back exactly.

Their values are no bytes that can be copied into an arena: savers in the background carry each part with its quantizer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import dcp_all as dcp
from dcp_async import AsyncSaver
from dcp_core import UnsupportedValueError

pytestmark = [  # of torch itself
    pytest.mark.filterwarnings("ignore:.*quantized tensor creation:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]

ROWS, COLUMNS = 8, 6
WORLD = 2


def _values(seed: int) -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))


def _per_channel(seed: int, axis: int, zero_points: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    channels = (ROWS, COLUMNS)[axis]
    scales = torch.linspace(0.1, 0.3, channels, dtype=torch.float64)
    return torch.quantize_per_channel(_values(seed), scales, zero_points[:channels], axis, dtype)


QUANTIZERS: dict[str, Callable[[int], torch.Tensor]] = {
    "per tensor": lambda seed: torch.quantize_per_tensor(_values(seed), 0.07, 3, torch.qint8),
    "per tensor, 32 bits": lambda seed: torch.quantize_per_tensor(_values(seed), 1e-6, -7, torch.qint32),
    "per row": lambda seed: _per_channel(seed, 0, torch.arange(ROWS), torch.quint8),
    "per column": lambda seed: _per_channel(seed, 1, torch.arange(ROWS), torch.qint8),
    "per row, float zero points": lambda seed: _per_channel(seed, 0, torch.linspace(0, 0.5, ROWS), torch.quint8),
}
INDIVISIBLE = {"per row, float zero points"}
"""torch makes no views of their parts."""


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _declared(tensor: torch.Tensor, *, parts: int = 1) -> torch.Tensor:
    """The rank's rows, in so many shards."""
    rows = ROWS // dist.get_world_size()
    first, step = dist.get_rank() * rows, rows // parts
    local: Any = tensor[first : first + rows].clone()
    local.global_shape = (ROWS, COLUMNS)
    local.local_offsets = tuple((at * step, 0) for at in range(parts))
    local.global_offsets = tuple((first + at * step, 0) for at in range(parts))
    local.local_sizes = ((step, COLUMNS),) * parts
    return local  # type: ignore[no-any-return]


def _dtensor(tensor: torch.Tensor, placement: Placement) -> torch.Tensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    local = tensor
    if isinstance(placement, Shard):
        local = tensor.tensor_split(dist.get_world_size(), placement.dim)[dist.get_rank()].clone()
    return DTensor.from_local(local, mesh, [placement], run_check=False)


KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": _whole,
    "declared": _declared,
    "declared, two shards": lambda tensor: _declared(tensor, parts=2),
    "DTensor of rows": lambda tensor: _dtensor(tensor, Shard(0)),
    "DTensor of columns": lambda tensor: _dtensor(tensor, Shard(1)),
    "DTensor, replicated": lambda tensor: _dtensor(tensor, Replicate()),
}
SAVERS = ["sync", "thread", "process"]


@contextlib.contextmanager
def _saver(name: str) -> Iterator[Callable[[Any, str], Any]]:
    """A function that saves a state dict into a folder, and waits for it."""
    if name == "sync":
        yield lambda state, folder: dcp.save(state, checkpoint_id=folder)
        return
    with AsyncSaver(name) as saver:
        yield lambda state, folder: saver.save(state, checkpoint_id=folder).result()  # type: ignore[union-attr]


def _state(seed: int, kinds: dict[str, Callable[[torch.Tensor], torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {
        f"{kind}; {name}": make(quantize(seed))
        for kind, make in kinds.items()
        for name, quantize in QUANTIZERS.items()
        if name not in INDIVISIBLE or kind in ("whole", "DTensor, replicated")
    }


def _exact(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Scheme, quantizer and integers of what this rank holds of a tensor."""
    local: torch.Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    scheme = local.qscheme()
    if scheme == torch.per_tensor_affine:
        quantizer: tuple[Any, ...] = (local.q_scale(), local.q_zero_point())
    else:
        scales, points = local.q_per_channel_scales(), local.q_per_channel_zero_points()
        quantizer = (local.q_per_channel_axis(), scales.tolist(), points.tolist())
    return scheme, local.dtype, quantizer, local.int_repr().tolist()


def _differing(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    return [name for name, tensor in wanted.items() if _exact(found[name]) != _exact(tensor)]


def _save_and_load(folder: str, saver: str) -> list[list[str]]:
    """Names of what came back otherwise: after one save, and after another of changed values (a delta for a worker)."""
    differing = []
    with _saver(saver) as save:
        for seed in (1, 2):
            save(_state(seed, KINDS), folder)
            template = _state(5, KINDS)
            dcp.load(template, checkpoint_id=folder)
            differing.append(_differing(template, _state(seed, KINDS)))
    return differing


def _load_whole(folder: str) -> list[str]:
    template = _state(5, dict.fromkeys(KINDS, _whole))
    dcp.load(template, checkpoint_id=folder)
    return _differing(template, _state(2, dict.fromkeys(KINDS, _whole)))


@pytest.mark.parametrize("saver", SAVERS)
def test_values_and_quantizers_come_back_exactly(ranks: Any, saver: str, tmp_path: Path) -> None:
    assert ranks.run(WORLD, _save_and_load, str(tmp_path), saver) == [[[], []]] * WORLD
    assert ranks.run(1, _load_whole, str(tmp_path)) == [[]]


def _rows(name: str, sizes: tuple[int, ...]) -> torch.Tensor:
    """Rows that begin a matrix, quantized in one of three ways; torch cannot make none of some by a slice."""
    if name == "per tensor":
        return torch._empty_affine_quantized(sizes, scale=0.07, zero_point=3, dtype=torch.qint8)
    axis = {"per row": 0, "per column": 1}[name]
    scales = torch.linspace(0.1, 0.3, COLUMNS, dtype=torch.float64)[: sizes[axis]]
    points = torch.arange(len(scales))
    return torch._empty_per_channel_affine_quantized(
        sizes, scales=scales, zero_points=points, axis=axis, dtype=torch.quint8
    )


def _thin_state(fill: int) -> dict[str, torch.Tensor]:
    """Tensors of one row, which rank 0 alone holds, and of none."""
    state = {}
    for name in ("per tensor", "per row", "per column"):
        for rows in (0, 1):
            mesh = init_device_mesh("cpu", (WORLD,))
            local = _rows(name, (rows if dist.get_rank() == 0 else 0, COLUMNS))
            if local.numel():
                local.fill_(fill)
            shape = torch.Size((rows, COLUMNS))
            sharded = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=(COLUMNS, 1))
            state[f"{rows} rows, {name}"] = sharded
        state[f"whole, {name}"] = _rows(name, (0, COLUMNS))
        state[f"replicated, {name}"] = _dtensor(_rows(name, (0, COLUMNS)), Replicate())
    return state


def _save_and_load_thin(folder: str, saver: str) -> tuple[list[str], list[str]]:
    with _saver(saver) as save:
        save(_thin_state(2), folder)
    template = _thin_state(1)
    dcp.load(template, checkpoint_id=folder)
    whole = dcp.load_keys(checkpoint_id=folder)
    # A row of one channel, cut from a tensor of one channel a row, is quantized per tensor to torch.
    names = [name for name in template if "1 rows" not in name or dist.get_rank() == 0]
    return _differing(template, _thin_state(2)), [
        name for name in names if _exact(whole[name])[2] != _exact(template[name])[2]
    ]


@pytest.mark.parametrize("saver", SAVERS)
def test_parts_without_elements_keep_their_quantizer(ranks: Any, saver: str, tmp_path: Path) -> None:
    assert ranks.run(WORLD, _save_and_load_thin, str(tmp_path), saver) == [([], [])] * WORLD


UNABLE: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "shards, float zero points": (
        lambda: _declared_alone(QUANTIZERS["per row, float zero points"](1), parts=2),
        r"'model\.q' .* several parts, .*float_qparams",
    ),
    "no quantizer": (lambda: torch.empty(3, dtype=torch.qint8), r"'model\.q' .* no quantizer"),
    "shards, no quantizer": (
        lambda: _declared_alone(torch.empty(ROWS, COLUMNS, dtype=torch.qint8), parts=2),
        r"'model\.q' .* no quantizer",
    ),
}


def _declared_alone(tensor: Any, *, parts: int) -> torch.Tensor:
    step = ROWS // parts
    tensor.global_shape = (ROWS, COLUMNS)
    tensor.global_offsets = tensor.local_offsets = tuple((at * step, 0) for at in range(parts))
    tensor.local_sizes = ((step, COLUMNS),) * parts
    return tensor  # type: ignore[no-any-return]


@pytest.fixture(scope="module", params=SAVERS)
def save(request: pytest.FixtureRequest) -> Iterator[Callable[[Any, str], Any]]:
    """The function of `_saver`, one for all tests of this process."""
    with _saver(request.param) as made:
        yield made


@pytest.mark.parametrize("name", UNABLE)
def test_what_cannot_be_divided_is_refused_by_its_key(
    save: Callable[[Any, str], Any], name: str, tmp_path: Path
) -> None:
    make, message = UNABLE[name]
    with pytest.raises(UnsupportedValueError, match=message):
        save({"model": {"q": make()}}, str(tmp_path))
    assert not (tmp_path / ".metadata").exists()


def test_a_load_of_several_parts_needs_a_quantizer(tmp_path: Path) -> None:
    """The index does not hold it, and the parts may have different ones."""
    state = {"q": _declared_alone(QUANTIZERS["per row"](1), parts=2)}
    dcp.save(state, checkpoint_id=tmp_path)
    with pytest.raises(UnsupportedValueError, match=r"'q' .* no quantizer"):
        dcp.load_keys(checkpoint_id=tmp_path)
    with pytest.raises(UnsupportedValueError, match=r"'q' .* no quantizer"):
        dcp.load({"q": torch.empty(ROWS, COLUMNS, dtype=torch.quint8)}, checkpoint_id=tmp_path)


def _chunks_of_replicas(folder: str) -> list[int]:
    numbers = []
    for quantized in (False, True):
        local = torch.zeros(4096, 1024, dtype=torch.int8)
        if quantized:
            local = torch.quantize_per_tensor(torch.zeros(local.shape), scale=0.5, zero_point=1, dtype=torch.qint8)
        metadata: Any = dcp.save({"q": _dtensor(local, Replicate())}, checkpoint_id=folder)
        numbers.append(len(metadata.state_dict_metadata["q"].chunks))
    return numbers


def test_quantized_replicas_are_not_cut_across_ranks(ranks: Any, tmp_path: Path) -> None:
    """Their parts would be archives, which only templates with the same quantizer take."""
    assert ranks.run(WORLD, _chunks_of_replicas, str(tmp_path)) == [[2, 1]] * WORLD
