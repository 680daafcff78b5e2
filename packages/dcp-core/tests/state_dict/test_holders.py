from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from dcp_core import PerRank
from dcp_core.state_dict.holders import HeldTensor, find_holders
from dcp_core.testing.sharding import distribute


def held_on_a_mesh() -> list[HeldTensor]:
    mesh = init_device_mesh("cpu", (2, 2))

    def put(*placements: Any) -> torch.Tensor:
        return distribute(torch.ones(4, 6), mesh, [*placements])

    state = {
        "rows": put(Replicate(), Shard(0)),
        "quarters": put(Shard(0), Shard(1)),
        "strided": put(Shard(0), Shard(0)),
        "all": put(Replicate(), Replicate()),
        "plain": torch.ones(3),
        "own": PerRank(torch.ones(2)),
        "step": 1,
    }
    tensors, objects = find_holders({"model": state}, dist.get_rank())
    assert objects == 1
    return tensors


def test_boxes_of_all_ranks_are_known_without_a_word(ranks: Any) -> None:
    for rank, tensors in enumerate(ranks.run(4, held_on_a_mesh)):
        found = {each.name.removeprefix("model."): each.boxes for each in tensors}
        assert found == {
            "rows": {((0, 0), (2, 6)): (0, 2), ((2, 0), (2, 6)): (1, 3)},
            "quarters": {
                ((0, 0), (2, 3)): (0,),
                ((0, 3), (2, 3)): (1,),
                ((2, 0), (2, 3)): (2,),
                ((2, 3), (2, 3)): (3,),
            },
            "strided": {((row, 0), (1, 6)): (row,) for row in range(4)},
            "all": {((0, 0), (4, 6)): (0, 1, 2, 3)},
            "plain": {((0,), (3,)): ()},
            f"own.rank_{rank}": {((0,), (2,)): (rank,)},
        }
        assert {(each.dtype, each.item_bytes) for each in tensors} == {("float32", 4)}


class Holder:
    def state_dict(self) -> dict[str, Any]:
        return {"weight": torch.ones(2, device="meta", dtype=torch.bfloat16)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def test_objects_with_states_and_meta_tensors_are_looked_into() -> None:
    tensors, objects = find_holders({"model": Holder(), "note": "x"}, 0)
    assert tensors == [HeldTensor("model.weight", "bfloat16", (2,), 2, {((0,), (2,)): ()})]
    assert objects == 1
