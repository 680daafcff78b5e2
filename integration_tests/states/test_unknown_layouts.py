"""Layouts of DTensors that are not known: each reader of a layout refuses them by key, whatever it has seen before."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from dcp_async.staging.skeleton import look_through
from dcp_core import DcpError
from dcp_core.shards.shards import local_tensor
from dcp_core.state_dict.holders import find_holders
from dcp_core.tables.value_table import local_values
from dcp_state import StateDictOptions
from dcp_state.sharding import convert_tensors, fill_shards, place, same_placement

ROWS = 8


class Interleaved(Shard):
    """Rank r holds rows r, r + n, r + 2n, …"""


class OwnReplica(Replicate):
    pass


@pytest.fixture(autouse=True)
def _one_of_four() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()


def made(placement: Placement, ranks: Sequence[int] = (0, 1, 2, 3)) -> DTensor:
    rows = ROWS if isinstance(placement, Replicate) else ROWS // 4
    mesh = DeviceMesh("cpu", [*ranks])
    local = torch.zeros(rows, 2)
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=torch.Size((ROWS, 2)), stride=(2, 1))


def with_padding(padding: int) -> DTensor:
    """Return a tensor with a spec of a later torch, whose comparison was not extended to its new field."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    value = made(Shard(0))
    later = dataclasses.make_dataclass("Later", [("padding", object, 0)], bases=(DTensorSpec,), eq=False)
    spec = later(value._spec.mesh, value._spec.placements, value._spec.tensor_meta)
    spec.padding = padding
    value._spec = spec
    return value


UNKNOWN: dict[str, tuple[Callable[[], DTensor], Callable[[], DTensor]]] = {
    "subclass of Shard": (lambda: made(Shard(0)), lambda: made(Interleaved(0))),
    "subclass of Replicate": (lambda: made(Replicate()), lambda: made(OwnReplica())),
    "mesh of descending ranks": (lambda: made(Shard(0)), lambda: made(Shard(0), (3, 2, 1, 0))),
    "field of a spec": (lambda: with_padding(0), lambda: with_padding(1)),
}


def _staged(known: DTensor, unknown: DTensor) -> None:
    forms: dict[Any, Any] = {}
    look_through({"known": known}, forms=forms)
    look_through({"w": unknown}, forms=forms)


READERS: dict[str, Callable[[DTensor, DTensor], object]] = {
    "plan": lambda known, unknown: local_values({"known": known, "w": unknown}),
    "shards": lambda known, unknown: (local_tensor("known", known), local_tensor("w", unknown)),
    "holders": lambda known, unknown: find_holders({"known": known, "w": unknown}, 0),
    "staging, one save": lambda known, unknown: look_through({"known": known, "w": unknown}),
    "staging, next save": _staged,
    "gathered": lambda known, unknown: convert_tensors({"w": unknown}, StateDictOptions(full_state_dict=True)),
    "placed like a known one": lambda known, unknown: place("w", unknown, known),
    "placed like an unknown one": lambda known, unknown: place("w", torch.zeros(ROWS, 2), unknown),
    "filled": lambda known, unknown: fill_shards("w", torch.zeros(ROWS, 2), unknown),
}


@pytest.mark.parametrize("kind", UNKNOWN)
@pytest.mark.parametrize("reader", READERS)
def test_unknown_layouts_are_refused_by_key(kind: str, reader: str) -> None:
    known, unknown = (make() for make in UNKNOWN[kind])
    assert not same_placement(known, unknown)
    with pytest.raises(DcpError, match=r"'w' .*unknown layout|w: sharded over another device mesh"):
        READERS[reader](known, unknown)


def test_the_order_of_ranks_that_hold_replicas_does_not_matter() -> None:
    made_of = made(Replicate(), (3, 2, 1, 0))
    assert [tuple(shard.sizes) for shard in local_tensor("w", made_of).shards] == [(ROWS, 2)]
