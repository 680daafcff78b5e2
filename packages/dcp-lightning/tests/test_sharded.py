"""Loads into modules and optimizers in place: everything is checked before a value changes."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from dcp_core import CheckpointException, LoadMismatchError, UnsafeCheckpointError, save

pytest.importorskip("lightning", reason="needs Lightning: `nox -s frameworks` installs it")

if TYPE_CHECKING:
    from dcp_core.testing.ranks import RankPool


class Kind(Enum):
    """A value of a parameter group that is neither a number nor text."""

    FAST = 1


def trained(seed: int, *, width: int = 3, wraps: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer after one step."""
    torch.manual_seed(seed)
    model: nn.Module = nn.Linear(2, width)
    if wraps and torch.distributed.is_initialized():
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return all values of a model and its optimizer, tensors as bytes."""

    def plain(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        value = getattr(value, "to_local", lambda: value)()
        return (str(value.dtype), tuple(value.shape), value.detach().contiguous().numpy().tobytes())

    state = optimizer.state_dict()
    return {
        "model": {name: plain(value) for name, value in model.state_dict().items()},
        "state": {
            (number, name): plain(value) for number, each in state["state"].items() for name, value in each.items()
        },
        "groups": state["param_groups"],
    }


def saved(kind: str) -> dict[str, Any]:
    """Return the state that is saved, which does not fit in the way that `kind` says."""
    from dcp_lightning.sharded import state_of

    model, optimizer = trained(2, width=4 if kind == "another shape" else 3)
    state = {"model": state_of(model, ()), "optimizer": state_of(optimizer, [model])}
    if kind == "more in the model":
        del state["model"]["bias"]
    elif kind == "more in the checkpoint":
        state["model"]["extra"] = torch.ones(1)
    elif kind == "no optimizer":
        del state["optimizer"]
    elif kind == "no state of a parameter":
        del state["optimizer"]["state"]["bias"]["exp_avg"]
    elif kind == "state of another parameter":
        state["optimizer"]["state"]["extra"] = state["optimizer"]["state"]["bias"]
    elif kind == "more state of a parameter":
        state["optimizer"]["state"]["bias"]["max_exp_avg_sq"] = torch.ones(3)
    return state


REFUSALS = {
    "more in the model": r"model\.bias",
    "more in the checkpoint": r"model\.extra.*not in the model",
    "another shape": r"model\.weight",
    "no optimizer": r"optimizer\.state",
    "no state of a parameter": r"optimizer\.state\.bias\.exp_avg",
    "state of another parameter": r"optimizer\.state\.extra\.step.*not in the model or its optimizers",
    "more state of a parameter": r"optimizer\.state\.bias\.max_exp_avg_sq.*not in the model or its optimizers",
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_after_a_refusal_every_bit_is_as_before(kind: str, tmp_path: Path) -> None:
    from dcp_lightning import DcpCheckpointIO
    from dcp_lightning.sharded import load_shards

    save(saved(kind), checkpoint_id=tmp_path / "one")
    model, optimizer = trained(1)
    before = bits(model, optimizer)
    parts = {"model": model, "optimizer": optimizer}
    with pytest.raises(LoadMismatchError, match=REFUSALS[kind]):
        load_shards(DcpCheckpointIO(), tmp_path / "one", parts, strict=True, weights_only=None)
    assert bits(model, optimizer) == before


@pytest.mark.parametrize("listed", [False, True])
def test_optimizers_that_only_the_checkpoint_has_are_refused_and_left_over_settings_are_not(
    listed: bool, tmp_path: Path
) -> None:
    from dcp_lightning import DcpCheckpointIO
    from dcp_lightning.sharded import load_shards

    state = saved("")
    for group in state["optimizer"]["param_groups"]:
        group["initial_lr"] = 0.3  # what a scheduler adds
    if listed:
        state["optimizer"] = [state["optimizer"]]
    save(state, checkpoint_id=tmp_path / "one")
    model, optimizer = trained(1)
    parts = {"model": model, "optimizer": [optimizer] if listed else optimizer}
    with pytest.warns(UserWarning, match="initial_lr"):
        load_shards(DcpCheckpointIO(), tmp_path / "one", parts, strict=True, weights_only=None)
    assert optimizer.param_groups[0]["lr"] == 0.2
    if listed:
        save({**state, "optimizer": state["optimizer"] * 2}, checkpoint_id=tmp_path / "two")
        before = bits(model, optimizer)
        with pytest.raises(LoadMismatchError, match=r"optimizer\.1\."):
            load_shards(DcpCheckpointIO(), tmp_path / "two", parts, strict=True, weights_only=None)
        assert bits(model, optimizer) == before


def refuse_on_ranks(folder: str, kind: str) -> str:
    from dcp_lightning import DcpCheckpointIO
    from dcp_lightning.sharded import load_shards

    model, optimizer = trained(1, wraps=True)
    before = bits(model, optimizer)
    try:
        parts = {"model": model, "optimizer": optimizer}
        load_shards(DcpCheckpointIO(), folder, parts, strict=True, weights_only=None)
    except CheckpointException as error:
        assert bits(model, optimizer) == before
        return str(error)
    raise AssertionError("it was not refused")


def test_after_a_refusal_every_bit_is_as_before_on_ranks(tmp_path: Path, ranks: RankPool) -> None:
    for kind in ("more in the checkpoint", "another shape"):
        save(saved(kind), checkpoint_id=tmp_path / kind)
        for said in ranks.run(2, refuse_on_ranks, str(tmp_path / kind), kind):
            assert REFUSALS[kind].partition(".*")[0].replace("\\", "") in said


def test_what_is_missing_is_left_as_it_is_without_strict(tmp_path: Path) -> None:
    from dcp_lightning import DcpCheckpointIO
    from dcp_lightning.sharded import load_shards

    state = saved("more in the checkpoint")
    del state["model"]["bias"]
    save(state, checkpoint_id=tmp_path / "one")
    model, optimizer = trained(1)
    before = model.state_dict()["bias"].clone()
    parts = {"model": model, "optimizer": optimizer}
    with pytest.warns(UserWarning, match=r"1 key.*'model\.extra'"):
        load_shards(DcpCheckpointIO(), tmp_path / "one", parts, strict=False, weights_only=None)
    assert torch.equal(model.state_dict()["bias"], before)
    assert torch.equal(model.state_dict()["weight"], state["model"]["weight"])
    assert optimizer.param_groups[0]["lr"] == 0.2


def test_objects_in_an_optimizer_need_trust_as_others_do(tmp_path: Path) -> None:
    from dcp_lightning import DcpCheckpointIO
    from dcp_lightning.sharded import load_shards

    state = saved("")
    state["optimizer"]["param_groups"][0]["kind"] = Kind.FAST
    with pytest.warns(UserWarning, match="Kind"):
        save(state, checkpoint_id=tmp_path / "one")
    model, optimizer = trained(1)
    optimizer.param_groups[0]["kind"] = None
    parts = {"model": model, "optimizer": optimizer}
    with pytest.raises(UnsafeCheckpointError, match="Kind"):
        load_shards(DcpCheckpointIO(), tmp_path / "one", parts, strict=True, weights_only=None)
    for plugin, weights_only in ((DcpCheckpointIO(), False), (DcpCheckpointIO(allow_globals=[Kind]), None)):
        optimizer.param_groups[0]["kind"] = None
        load_shards(plugin, tmp_path / "one", parts, strict=True, weights_only=weights_only)
        assert optimizer.param_groups[0]["kind"] is Kind.FAST


@pytest.mark.filterwarnings("ignore")  # PyTorch's own save warns of a save without a process group
def test_whose_checkpoint_it_is(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as stock

    from dcp_lightning import DcpCheckpointIO
    from dcp_lightning.sharded import is_of_lightning

    place = str(tmp_path / "last.ckpt")
    assert not is_of_lightning(place)
    stock.save({"state_dict": {"w": torch.ones(2)}}, checkpoint_id=place, no_dist=True)
    torch.save({"global_step": 1}, tmp_path / "last.ckpt" / "meta.pt")
    assert is_of_lightning(place)
    DcpCheckpointIO().save_checkpoint({"global_step": 2}, place)
    assert not is_of_lightning(place)  # else its stale meta.pt would be loaded
    torch.save({"global_step": 1}, tmp_path / "file.ckpt")
    assert is_of_lightning(str(tmp_path / "file.ckpt"))
