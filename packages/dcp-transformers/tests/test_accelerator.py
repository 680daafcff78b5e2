"""What an accelerator has prepared and registered comes back, on ranks of DDP and FSDP2 and in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from dcp_async import AsyncSaver
from dcp_core import load_keys
from dcp_transformers import load_state, save_state

RANKS = Path(__file__).with_name("accelerate_ranks.py")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")


def said(ran: Any, word: str) -> set[str]:
    return {line for line in ran.stdout.splitlines() if line.startswith(word)}


@pytest.mark.timeout(900)  # five processes each that import torch and accelerate
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_on_two_ranks_and_in_one_process(kind: str, tmp_path: Path, run_ranks: Callable[..., Any]) -> None:
    folder = str(tmp_path / "state")
    saved = run_ranks(RANKS, 2, kind, folder, "save")
    (state,), (end,) = said(saved, "saved"), said(saved, "done")
    assert said(saved, "sharded") == {f"sharded {4 if kind == 'fsdp2' else 0} 2"}
    again = run_ranks(RANKS, 2, kind, folder, "load")
    assert said(again, "loaded") == {state.replace("saved", "loaded")}
    assert said(again, "done") == {end}
    alone = run_ranks(RANKS, 1, "ddp", folder, "load")
    assert said(alone, "loaded") == {state.replace("saved", "loaded")}


def fresh(models: int = 1) -> tuple[Accelerator, list[Any]]:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True)
    made = [torch.nn.Linear(3, 2) for _ in range(models)]
    optimizers = [torch.optim.AdamW(model.parameters()) for model in made]
    return accelerator, list(accelerator.prepare(*made, *optimizers))


def train(accelerator: Accelerator, prepared: list[Any]) -> None:
    half = len(prepared) // 2
    for model, optimizer in zip(prepared[:half], prepared[half:], strict=True):
        accelerator.backward(model(torch.randn(5, 3)).square().sum())
        optimizer.step()
        optimizer.zero_grad()


def test_several_models_a_scaler_and_the_step(tmp_path: Path) -> None:
    accelerator, prepared = fresh(2)
    train(accelerator, prepared)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    accelerator.step = 5
    save_state(accelerator, tmp_path / "state", epoch=2)
    noise = torch.randn(3)
    other, again = fresh(2)
    other.scaler = torch.amp.GradScaler("cpu")
    assert load_state(other, tmp_path / "state", epoch=0) == {"epoch": 2}
    assert torch.equal(torch.randn(3), noise)
    assert other.step == 5
    assert other.scaler.get_scale() == 8.0
    for one, two in zip(prepared[:2], again[:2], strict=True):
        assert torch.equal(one.weight, two.weight)
    assert torch.equal(prepared[3].state[prepared[1].weight]["exp_avg"], again[3].state[again[1].weight]["exp_avg"])


def test_in_the_background_what_was_when_it_was_called(tmp_path: Path) -> None:
    accelerator, prepared = fresh()
    train(accelerator, prepared)
    weight = prepared[0].weight.detach().clone()
    with AsyncSaver("thread") as saver:
        future = save_state(accelerator, tmp_path / "state", saver=saver)
        with torch.no_grad():
            prepared[0].weight.zero_()
        assert future is not None
        future.result(60)
    load_state(accelerator, tmp_path / "state")
    assert torch.equal(prepared[0].weight, weight)


def test_the_position_of_a_stateful_loader(tmp_path: Path) -> None:
    class Loader(SimpleNamespace):
        """What accelerate makes of torchdata's loader, as far as states go."""

        use_stateful_dataloader = True

        def state_dict(self) -> dict[str, Any]:
            return {"position": self.position}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.position = state["position"]

    accelerator, _ = fresh()
    accelerator._dataloaders.append(Loader(position=7, iteration=3))
    save_state(accelerator, tmp_path / "state")
    other, _ = fresh()
    other._dataloaders.append(loader := Loader(position=0, iteration=0))
    load_state(other, tmp_path / "state")
    assert (loader.position, loader.iteration) == (7, 3)


def test_nothing_prepared_and_names_that_are_taken(tmp_path: Path) -> None:
    accelerator, _ = fresh()
    for name in ("model", "random"):
        with pytest.raises((ValueError, TypeError), match=name):
            save_state(accelerator, tmp_path / "state", **{name: 1})
    accelerator._models.clear()
    with pytest.raises(ValueError, match="pass it to accelerator"):
        save_state(accelerator, tmp_path / "state")


def test_names_are_those_of_the_bare_model(tmp_path: Path) -> None:
    accelerator, _ = fresh()
    save_state(accelerator, tmp_path / "state")
    model = load_keys("app.model", checkpoint_id=str(tmp_path / "state"), no_dist=True)["app"]["model"]
    assert set(model) == {"weight", "bias"}
