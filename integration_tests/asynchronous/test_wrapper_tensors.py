"""Wrapper tensors (of classes as torchao's and TransformerEngine's) through every saver, whole and in shards.

Every combination of who saves and who loads, ours and stock, gives the same bits, also on another number of ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import dcp_all as dcp
from dcp_async import AsyncSaver
from dcp_core.errors import CheckpointException, UnsupportedValueError
from dcp_state.options import StateDictOptions
from dcp_state.sharding import convert_tensors
from integration_tests.kits.wrapper_tensors import WRAPPER_GLOBALS, BlockTensor, MethodTensor

ROWS, COLUMNS = 10, 8
Make = Callable[[torch.Tensor], torch.Tensor]


def _values(seed: int) -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))


def _whole(values: torch.Tensor, kind: Make) -> torch.Tensor:
    return kind(values)


def _dtensor(values: torch.Tensor, kind: Make, placement: Placement) -> torch.Tensor:
    """Each rank quantizes its shard, as an optimizer does for its state; the shards are uneven on 4 ranks."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    if isinstance(placement, Shard):
        chunks = values.chunk(ranks, placement.dim)
        at = dist.get_rank()
        values = chunks[at] if at < len(chunks) else values[:0]
    return DTensor.from_local(
        kind(values), mesh, [placement], run_check=False, shape=torch.Size((ROWS, COLUMNS)), stride=(COLUMNS, 1)
    )


LAYOUTS: dict[str, Callable[[torch.Tensor, Make], torch.Tensor]] = {
    "whole": _whole,
    "rows": lambda values, kind: _dtensor(values, kind, Shard(0)),
    "replicated": lambda values, kind: _dtensor(values, kind, Replicate()),
}
KINDS: dict[str, Make] = {"block": BlockTensor.of, "method": MethodTensor.of}
FORMS = [(layout, kind) for layout in LAYOUTS for kind in KINDS if not (layout == "rows" and kind == "method")]
"""A `MethodTensor` has one scale for all rows: its shards cannot be told apart from parts of another tensor."""


def _state(seed: int, forms: list[tuple[str, str]]) -> dict[str, Any]:
    made = {f"{layout} {kind}": LAYOUTS[layout](_values(seed), KINDS[kind]) for layout, kind in forms}
    return {"m": made, "plain": _values(seed), "step": seed}


def _exact(tensor: torch.Tensor) -> list[Any]:
    """What this rank holds of a tensor: the inner tensors."""
    local: Any = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if isinstance(local, BlockTensor):
        return [local.codes.tolist(), local.scale.tolist()]
    return [local._data.tolist(), local._scale_inv.tolist()] if isinstance(local, MethodTensor) else local.tolist()


def _differing(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    names = [name for name, tensor in wanted["m"].items() if _exact(found["m"][name]) != _exact(tensor)]
    return names + [name for name in ("plain",) if not torch.equal(found[name], wanted[name])]


@contextlib.contextmanager
def _saver(name: str) -> Iterator[Callable[[Any, str], Any]]:
    if name in ("sync", "stock"):
        module: Any = dcp if name == "sync" else stock
        yield lambda state, folder: module.save(state, checkpoint_id=folder)
        return
    if name == "async_save":
        yield lambda state, folder: dcp.async_save(state, checkpoint_id=folder).result()  # type: ignore[union-attr]
        return
    with AsyncSaver(name) as saver:  # type: ignore[arg-type]
        yield lambda state, folder: saver.save(state, checkpoint_id=folder).result()  # type: ignore[union-attr]


def _save_and_load(folder: str, saver: str, loader: str, forms: list[tuple[str, str]]) -> list[list[str]]:
    differing = []
    with torch.serialization.safe_globals(WRAPPER_GLOBALS), _saver(saver) as save:
        for seed in (1, 2):  # the second save of a worker sends only what differs
            save(_state(seed, forms), f"{folder}/{seed}")
            template = _state(5, forms)
            _load(template, f"{folder}/{seed}", loader)
            differing.append(_differing(template, _state(seed, forms)))
    return differing


def _load(template: dict[str, Any], folder: str, loader: str) -> None:
    if loader == "stock":
        stock.load(template, checkpoint_id=folder)
    else:
        dcp.load(template, checkpoint_id=folder, cooperative=loader == "together")


@pytest.mark.parametrize("loader", ["ours", "together"])
@pytest.mark.parametrize("saver", ["sync", "thread", "process", "async_save"])
def test_inner_tensors_come_back_exactly(ranks: Any, saver: str, loader: str, tmp_path: Path) -> None:
    assert ranks.run(2, _save_and_load, str(tmp_path), saver, loader, FORMS) == [[[], []]] * 2


@pytest.mark.interop
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("saver", "loader"), [("stock", "ours"), ("sync", "stock"), ("process", "stock")])
def test_stock_reads_ours_and_we_read_stocks(ranks: Any, saver: str, loader: str, tmp_path: Path) -> None:
    forms = [form for form in FORMS if form[1] == "block"]  # stock refuses to load what pickles by a class method
    assert ranks.run(2, _save_and_load, str(tmp_path), saver, loader, forms) == [[[], []]] * 2
    if loader == "ours":
        assert ranks.run(2, _save_and_load, str(tmp_path / "m"), saver, loader, FORMS) == [[[], []]] * 2


def _save(folder: str) -> None:
    with torch.serialization.safe_globals(WRAPPER_GLOBALS):
        dcp.save(_state(1, [("rows", "block")]), checkpoint_id=folder)


def _reshard(folder: str, loader: str) -> list[float]:
    with torch.serialization.safe_globals(WRAPPER_GLOBALS):
        template = _state(5, [("rows", "block")])
        _load(template, folder, loader)
    local = template["m"]["rows block"]._local_tensor
    return [float(local.dequantize().sum()), float(local.codes.long().sum())]


@pytest.mark.interop
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ranks_then", [1, 2, 4])
@pytest.mark.parametrize("ranks_before", [1, 2, 4])
def test_resharding_gives_what_stock_gives(ranks: Any, ranks_before: int, ranks_then: int, tmp_path: Path) -> None:
    ranks.run(ranks_before, _save, str(tmp_path))
    found = [ranks.run(ranks_then, _reshard, str(tmp_path), loader) for loader in ("ours", "together", "stock")]
    assert found[0] == found[1] == found[2]
    whole = BlockTensor.of(_values(1))
    assert sum(codes for _, codes in found[0]) == float(whole.codes.long().sum())


def _tuple(folder: str, saver: str) -> list[str]:
    with torch.serialization.safe_globals(WRAPPER_GLOBALS), _saver(saver) as save:
        wanted, template = _state(1, FORMS), _state(5, FORMS)
        save({"t": (*wanted["m"].values(), wanted["plain"])}, folder)
        state = {"t": (*template["m"].values(), template["plain"])}
        dcp.load(state, checkpoint_id=folder)
    return _differing(template, wanted)


@pytest.mark.parametrize("saver", ["sync", "thread", "process"])
def test_tuples_hold_wrapper_tensors(ranks: Any, saver: str, tmp_path: Path) -> None:
    assert ranks.run(2, _tuple, str(tmp_path), saver) == [[], []]


def _meta(folder: str) -> list[str]:
    with torch.serialization.safe_globals(WRAPPER_GLOBALS):
        wanted = _state(1, [("rows", "block"), ("whole", "block")])
        dcp.save(wanted, checkpoint_id=folder)
        template = {"m": {name: _on_meta(each) for name, each in wanted["m"].items()}, "plain": _values(5), "step": 5}
        dcp.load(template, checkpoint_id=folder)
        return _differing(template, wanted)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        local = _on_meta(tensor._local_tensor)
        return DTensor.from_local(
            local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
    assert isinstance(tensor, BlockTensor)
    return BlockTensor(tensor.codes.to("meta"), tensor.scale.to("meta"), tensor.options)


def test_sharded_templates_on_the_meta_device_are_filled(ranks: Any, tmp_path: Path) -> None:
    assert ranks.run(2, _meta, str(tmp_path)) == [[], []]


def _gather(first_only: bool) -> str:
    options = StateDictOptions(full_state_dict=True, cpu_offload=first_only)
    try:
        convert_tensors({"w": _state(1, [("rows", "block")])["m"]["rows block"]}, options)
    except (CheckpointException, UnsupportedValueError) as error:
        return str(error)
    return "gathered"


@pytest.mark.parametrize("first_only", [False, True])
def test_a_class_that_cannot_be_gathered_is_refused_by_key(ranks: Any, first_only: bool) -> None:
    for message in ranks.run(2, _gather, first_only):
        assert "'w' has shards of class BlockTensor, which cannot be gathered" in message
        assert "without full_state_dict" in message


def _save_inside_out(folder: str) -> str:
    """The class is around the DTensor: each rank has other values, and the class hides it."""
    values = _values(1)
    plain = BlockTensor.of(values)
    mesh = init_device_mesh("cpu", (2,))
    codes = DTensor.from_local(plain.codes.chunk(2)[dist.get_rank()], mesh, [Shard(0)], run_check=False)
    with torch.serialization.safe_globals(WRAPPER_GLOBALS):
        try:
            dcp.save({"w": BlockTensor(codes, plain.scale, plain.options)}, checkpoint_id=folder)
        except CheckpointException as error:
            return str(error)
    return "saved"


def test_a_shard_inside_a_wrapper_tensor_is_refused(ranks: Any, tmp_path: Path) -> None:
    for message in ranks.run(2, _save_inside_out, str(tmp_path)):
        assert "'w' is a tensor of class integration_tests.kits.wrapper_tensors.BlockTensor" in message
        assert "holds a DTensor, this rank's part" in message


def _save_unknown(folder: str) -> str:
    try:
        dcp.save(_state(1, [("rows", "block")]), checkpoint_id=folder)
    except CheckpointException as error:
        return str(error)
    return "saved"


def test_unknown_classes_are_refused_on_every_rank(ranks: Any, tmp_path: Path) -> None:
    for message in ranks.run(2, _save_unknown, str(tmp_path)):
        assert "'m.rows block' is a tensor of class integration_tests.kits.wrapper_tensors.BlockTensor" in message
        assert "add_safe_globals([BlockOptions, BlockTensor])" in message
