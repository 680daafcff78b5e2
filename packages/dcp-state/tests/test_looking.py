"""Reading state changes no object, for every optimizer of torch; a run from saved state continues exactly."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dcp_core import load, save
from dcp_state import app_state, get_state_dict, set_state_dict
from integration_tests.kits.memory import MemoryReader, MemoryWriter

Make = Callable[[Any], torch.optim.Optimizer]
CHOICES: list[dict[str, Any]] = [
    {},
    {"foreach": True},
    {"foreach": False},
    {"fused": True},
    {"fused": True, "amsgrad": True},
    {"maximize": True},
    {"weight_decay": 0.1},
    {"amsgrad": True},
    {"lr": torch.tensor(0.01), "foreach": False},
    {"momentum": 0.9, "weight_decay": 0.1},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.9, "dampening": 0.5},
    {"momentum": 0.9, "centered": True},
    {"initial_accumulator_value": 0.3},
    {"decoupled_weight_decay": True, "weight_decay": 0.1},
]
NAMES = [
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
]
ONLY_LOOKED_AT: list[dict[str, Any]] = [{"capturable": True}, {"differentiable": True}]  # no step on leaves, on the CPU


def _variants(choices: Iterable[dict[str, Any]]) -> dict[str, Make]:
    found: dict[str, Make] = {}
    for name in NAMES:
        kind: Any = getattr(torch.optim, name)
        for choice in choices:
            tensor_lr = isinstance(choice.get("lr"), torch.Tensor)
            if choice.keys() <= inspect.signature(kind).parameters.keys() and not (tensor_lr and "Adam" not in name):
                found[f"{name} {choice}"] = lambda groups, kind=kind, choice=choice: kind(
                    groups, **{"lr": 0.01, **choice}
                )
    return found


class ByValue(torch.optim.Optimizer):
    """Has state that copies the weights, and state from the first gradient, as in other libraries."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.01, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                if parameter.grad is None or not parameter.grad.any():
                    continue
                state = self.state[parameter]
                if "z" not in state:
                    state["z"] = parameter.clone()
                    state["previous"] = -parameter.grad.clone()
                    state["rms"] = 0.0
                    state["parts"] = None
                state["z"].sub_(parameter.grad + 0.5 * state["previous"], alpha=group["lr"])
                state["previous"].copy_(parameter.grad)
                state["rms"] = parameter.grad.square().mean()
                state["parts"] = [state["rms"].clone()]
                parameter.lerp_(state["z"], 0.5)


class Inherits(torch.optim.AdamW):
    """Calls the step of its base class, which is decorated with the hooks of all optimizers; draws random numbers."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        random.random()
        np.random.random()
        torch.rand(1)
        super().step()


class Packs(torch.optim.SGD):
    """Has momentum in a dict within its state dict, as the optimizers of bitsandbytes do."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, lr=0.01, momentum=0.9)

    def state_dict(self) -> dict[str, Any]:
        packed = super().state_dict()
        state = {index: {"packed": dict(values)} for index, values in packed["state"].items()}
        return {**packed, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = {index: dict(values["packed"]) for index, values in state_dict["state"].items()}
        super().load_state_dict({**state_dict, "state": state})


OPTIMIZERS = {**_variants(CHOICES), "by value": ByValue, "inherits": Inherits, "packs": Packs}
OFTEN = [
    "AdamW {'fused': True, 'amsgrad': True}",
    "SGD {'momentum': 0.9, 'dampening': 0.5}",
    "Adafactor {}",
    "by value",
    "inherits",
    "packs",
]
ROWS = [
    pytest.param(name, steps, marks=[] if name in OFTEN else pytest.mark.slow)
    for name in OPTIMIZERS
    for steps in (0, 2)
]


class Net(nn.Module):
    """A model with an unused layer, and a layer with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.unused = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.norm(torch.tanh(self.first(data)))).square().sum()
        return result


def make_run(make: Make, seed: int) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = Net()
    parameters = list(net.parameters())
    return net, make([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.02}])


def train(net: nn.Module, optimizer: torch.optim.Optimizer, numbers: Iterable[int]) -> list[torch.Tensor]:
    for number in numbers:
        optimizer.zero_grad()
        net(torch.randn(5, 3, generator=torch.Generator().manual_seed(number))).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in net.parameters()]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def seen(value: Any, met: set[int]) -> Any:
    """All that can be compared of a value: identity, type, contents; of tensors version, gradient and hooks, too."""
    if isinstance(value, int | float | str | bytes | None):
        return type(value), repr(value)
    if id(value) in met:
        return id(value)
    met.add(id(value))
    if isinstance(value, torch.Tensor):
        gradient = seen(value.grad, met) if value.is_leaf else None
        return (
            id(value),
            value._version,
            value.to_dense().tolist(),
            value.requires_grad,
            gradient,
            value._backward_hooks,
        )
    if isinstance(value, dict):
        return id(value), [(seen(key, met), seen(each, met)) for key, each in value.items()]
    if isinstance(value, list | tuple | set):
        return id(value), [seen(each, met) for each in value]
    if isinstance(value, nn.Module | torch.optim.Optimizer):
        attributes = object.__getattribute__(value, "__dict__")
        return id(value), type(value), [(name, seen(each, met)) for name, each in attributes.items()]
    return id(value)


def world(net: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Everything that reading state could change."""
    met: set[int] = set()
    classes = [[(name, id(each)) for name, each in vars(kind).items()] for kind in type(optimizer).__mro__]
    random_states = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()
    modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_default_dtype(), net.training
    return seen(optimizer, met), seen(net, met), classes, random_states, modes


def look(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read the state in every available way."""
    get_state_dict(net, optimizer)
    save({"app": app_state(net, optimizer, step=1)}, storage_writer=MemoryWriter("looking"))


@pytest.mark.parametrize(("name", "steps"), ROWS)
def test_looking_changes_nothing_and_what_was_saved_resumes(name: str, steps: int) -> None:
    untouched, looked_at = make_run(OPTIMIZERS[name], 0), make_run(OPTIMIZERS[name], 0)
    for run in (untouched, looked_at):
        train(*run, range(steps))
    before = world(*looked_at)
    look(*looked_at)
    assert world(*looked_at) == before
    model, optimizer = get_state_dict(*looked_at)
    by_dict, by_checkpoint = make_run(OPTIMIZERS[name], 1), make_run(OPTIMIZERS[name], 1)
    load({"app": app_state(*by_checkpoint, step=0)}, storage_reader=MemoryReader("looking"))
    set_state_dict(*by_dict, model_state_dict=model, optim_state_dict=optimizer)
    wanted = train(*untouched, range(7, 10))
    for run in (looked_at, by_dict, by_checkpoint):
        assert equal(train(*run, range(7, 10)), wanted)


def test_what_a_class_packs_is_held_unpacked() -> None:
    looked_at, restored = make_run(Packs, 0), make_run(Packs, 1)
    train(*looked_at, range(2))
    look(*looked_at)
    load({"app": app_state(*restored, step=0)}, storage_reader=MemoryReader("looking"))
    for _, optimizer in (looked_at, restored):
        assert {name for values in optimizer.state.values() for name in values} == {"momentum_buffer"}


@pytest.mark.parametrize("name", list(_variants(ONLY_LOOKED_AT))[::4])
def test_optimizers_that_cannot_step_here_can_be_looked_at(name: str) -> None:
    run = make_run(_variants(ONLY_LOOKED_AT)[name], 0)
    before = world(*run)
    look(*run)
    assert world(*run) == before


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("kind", [torch.optim.SparseAdam, torch.optim.Adagrad])
def test_sparse_gradients(kind: Any) -> None:
    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        net = nn.ModuleDict({"used": nn.Embedding(6, 4, sparse=True), "unused": nn.Embedding(3, 2, sparse=True)})
        return net, kind(net.parameters(), lr=0.1)

    def steps(net: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        for number in range(2):
            optimizer.zero_grad()
            net["used"](torch.tensor([number, 3])).square().sum().backward()
            optimizer.step()
        return [parameter.detach().clone() for parameter in net.parameters()]

    one, other = make(0), make(1)
    steps(*one)
    before = world(*one)
    model, optimizer = get_state_dict(*one)
    assert world(*one) == before
    assert set(optimizer["state"]) == {"used.weight", "unused.weight"}
    set_state_dict(*other, model_state_dict=model, optim_state_dict=optimizer)
    assert equal(steps(*one), steps(*other))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon() -> None:
    nets = [nn.Linear(3, 4, bias=False) for _ in range(2)]
    one, other = [(net, torch.optim.Muon(net.parameters(), lr=0.1)) for net in nets]
    for steps in (0, 2):
        for _ in range(steps):
            one[0](torch.ones(3)).sum().backward()
            one[1].step()
        before = world(*one)
        model, optimizer = get_state_dict(*one)
        assert world(*one) == before
        set_state_dict(*other, model_state_dict=model, optim_state_dict=optimizer)
        for net, each in (one, other):
            net.zero_grad()
            net(torch.ones(3)).square().sum().backward()
            each.step()
        assert torch.equal(nets[0].weight, nets[1].weight)


def test_no_hook_sees_the_stand_in() -> None:
    """Hooks for all optimizers, of this one, and of schedulers and profilers over its methods; with modes around."""
    net, optimizer = make_run(Inherits, 0)
    make_run(torch.optim.AdamW, 0)  # from then on the step of the base class is decorated
    fired: list[str] = []
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    patched: Any = optimizer.step
    optimizer.step = lambda *args: fired.append("patched") or patched(*args)  # type: ignore[method-assign,func-returns-value]
    optimizer.register_step_pre_hook(lambda *_: fired.append("pre"))
    optimizer.register_step_post_hook(lambda *_: fired.append("post"))
    everywhere = [
        register_optimizer_step_pre_hook(lambda *_: fired.append("pre of all")),
        register_optimizer_step_post_hook(lambda *_: fired.append("post of all")),
    ]
    try:
        with torch.autocast("cpu"), torch.no_grad(), torch.inference_mode():
            before = world(net, optimizer)
            state = get_state_dict(net, optimizer)[1]
            assert world(net, optimizer) == before
        assert fired == []
        optimizer.step()
        assert set(fired) == {"patched", "pre", "post", "pre of all", "post of all"}
    finally:
        for hook in everywhere:
            hook.remove()
    assert not any(value.is_inference() for value in state["state"]["first.weight"].values())


def test_modules_stay_in_their_modes() -> None:
    net, optimizer = make_run(torch.optim.AdamW, 0)
    net.norm.eval()
    net.last.weight.requires_grad_(False)
    called: list[str] = []
    net.first.register_forward_hook(lambda *_: called.append("forward"))
    net.last.bias.register_hook(lambda _: called.append("gradient"))
    before = world(net, optimizer)
    look(net, optimizer)
    assert world(net, optimizer) == before
    assert [net.training, net.norm.training, called] == [True, False, []]
