"""Pictures of what FSDP1 and FSDP2 hold: the shards of all ranks, as one rank draws them."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from dcp_core import save
from dcp_inspect import visualize
from dcp_ranks.testing.ranks import RankPool
from integration_tests.state.nets import build

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
TITLE = "{http://www.w3.org/2000/svg}title"


def _tips(svg: str) -> list[str]:
    """What the picture says of each box: name, offsets, sizes and rank."""
    return [str(tip.text) for tip in ET.fromstring(svg).iter(TITLE)]


def _own_tips(state_dict: dict[str, Any]) -> list[str]:
    """The same of what this rank holds, as torch says."""
    boxes = []
    for name, value in state_dict.items():
        if isinstance(value, DTensor):
            sizes, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
            boxes.append((name, offsets, sizes))
        elif isinstance(value, ShardedTensor):
            parts = [shard.metadata for shard in value.local_shards()]
            boxes += [(name, part.shard_offsets, part.shard_sizes) for part in parts]
    return [f"{name}{[*offsets]} + {[*sizes]}: rank {dist.get_rank()}" for name, offsets, sizes in boxes if all(sizes)]


def _draw(kind: str, folder: str) -> tuple[list[str], list[str], str, str]:
    """What this rank draws, what it holds, and the titles of the state dict and of the checkpoint."""
    (model,) = build(kind).parts
    if isinstance(model, FullyShardedDataParallel):
        FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    state_dict, drawn = model.state_dict(), visualize(model)
    save(state_dict, checkpoint_id=folder)
    return _tips(drawn.svg), _own_tips(state_dict), drawn.title, visualize(folder).title


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp1-flat", "fsdp2"])
def test_one_rank_draws_what_all_hold(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    told = ranks.run(2, _draw, kind, str(tmp_path / "step-1"))
    # Layers that are alike are drawn once, under the name of the first; the buffer `seen` is not sharded.
    held = {tip.replace("layers.1.", "layers.0.") for _, own, _, _ in told for tip in own}
    for drawn, own, title, of_checkpoint in told:
        assert own
        assert {*drawn} == held | {"seen[] + []: each rank"}
        assert title.removeprefix("the state dict") == of_checkpoint.removeprefix("step-1")
