"""Sharded tensors in containers other than dicts and lists are saved as shards; in other objects they are refused."""

from __future__ import annotations

import collections
import dataclasses
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
import torch.utils._pytree as pytree
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dcp_all as dcp
from dcp_async.saver import shared_saver
from dcp_core import BlockingAsyncStager

FULL = torch.arange(512.0)[:, None].expand(512, 128).contiguous()  # above the size up to which replicas are compared


class Moments(NamedTuple):
    first: Any
    count: int


@dataclasses.dataclass
class Registered:
    first: Any
    count: int


@dataclasses.dataclass
class Unregistered:
    first: Any


if not hasattr(pytree, "register_dataclass"):
    pytree.register_pytree_node(  # torch 2.6
        Registered, lambda one: ([one.first, one.count], None), lambda children, _: Registered(*children)
    )
else:
    pytree.register_dataclass(Registered)

KINDS: dict[str, Any] = {
    "list": lambda tensor, count: [tensor, count],
    "tuple": lambda tensor, count: (tensor, count),
    "named tuple": Moments,
    "deque": lambda tensor, count: collections.deque([tensor, count], maxlen=2),
    "ordered dict": lambda tensor, count: collections.OrderedDict(a=tensor, b=count),
    "default dict": lambda tensor, count: collections.defaultdict(list, a=tensor, b=count),
    "registered": Registered,
    "tuple in a list": lambda tensor, count: [(tensor, count)],
    "tuple of tuples": lambda tensor, count: ((tensor,), (count, {"x": count})),
    "deque of registered": lambda tensor, count: collections.deque([Registered(tensor, count)]),
}


def parts(value: Any) -> list[Any]:
    """Return tensor and numbers of a container of `KINDS`."""
    return pytree.tree_flatten(value)[0]


def state(full: torch.Tensor, count: int, *, sharded: bool = True) -> dict[str, Any]:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),)) if sharded else None
    return {
        name: make(full.clone() if mesh is None else distribute_tensor(full, mesh, [Shard(0)]), count)
        for name, make in KINDS.items()
    }


def check(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, container in found.items():
        assert type(container) is type(wanted[name]), name
        for got, expected in zip(parts(container), parts(wanted[name]), strict=True):
            if isinstance(expected, DTensor):
                assert torch.equal(got.to_local(), expected.to_local()), name
            else:
                assert torch.equal(got, expected) if isinstance(expected, torch.Tensor) else got == expected, name
    assert found["deque"].maxlen == 2


def on_two_ranks(folder: str) -> None:
    wanted = state(FULL, 7)
    dcp.save(wanted, checkpoint_id=f"{folder}/save")
    dcp.async_save(wanted, checkpoint_id=f"{folder}/thread").result()
    planner = dcp.DefaultSavePlanner()
    dcp.async_save(
        wanted, checkpoint_id=f"{folder}/stager", planner=planner, async_stager=BlockingAsyncStager()
    ).result()
    shared_saver().close()
    for way in ("save", "thread", "stager"):
        template = state(torch.zeros_like(FULL), 0)
        dcp.load(template, checkpoint_id=f"{folder}/{way}")
        check(template, wanted)


def without_shards(folder: str) -> None:
    template = state(torch.zeros_like(FULL), 0, sharded=False)
    dcp.load(template, checkpoint_id=f"{folder}/save", no_dist=True)
    check(template, state(FULL, 7, sharded=False))
    whole = dcp.load_keys(["tuple"], checkpoint_id=f"{folder}/save")
    assert torch.equal(whole["tuple"][0], FULL)
    plain = {"tuple": [torch.zeros_like(FULL), 0]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock.load(plain, checkpoint_id=f"{folder}/save", no_dist=True)
    assert torch.equal(plain["tuple"][0], FULL)


def test_shards_in_containers_are_shards(ranks: Any, tmp_path: Path) -> None:
    ranks.run(2, on_two_ranks, str(tmp_path))
    ranks.run(1, without_shards, str(tmp_path))


def refused(folder: str) -> list[str]:
    mesh = dist.init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(FULL, mesh, [Shard(0)])
    module = torch.nn.Linear(2, 2)
    module.weight = torch.nn.Parameter(tensor)
    flat = torch.nn.Parameter(torch.ones(4))
    flat._fsdp_flattened = True  # type: ignore[attr-defined]
    found = []
    for value in (Unregistered(tensor), {tensor}, [Unregistered([tensor])], module, Unregistered(flat)):
        for save in (dcp.save, dcp.async_save):
            try:
                save({"some": {"key": value}}, checkpoint_id=f"{folder}/refused")
            except Exception as error:  # noqa: BLE001 - its text is looked at
                found.append(str(error))
    shared_saver().close()
    return found


def test_shards_in_other_objects_are_refused_by_key(ranks: Any, tmp_path: Path) -> None:
    found = ranks.run(2, refused, str(tmp_path))
    for messages in found:
        assert len(messages) == 10
        for message in messages:
            assert "'some.key'" in message
            assert "one rank's part" in message or "its state would not be restored" in message


def test_plain_tensors_in_tuples_stay_one_object(tmp_path: Path) -> None:
    state = {"t": (torch.ones(2), 1)}
    metadata = dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    assert list(metadata.state_dict_metadata) == ["t"]
