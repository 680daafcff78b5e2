"""Small models in every wrapper and parallelism, with optimizers and steps that are the same job on any ranks."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

__all__ = ["KINDS", "OTHERS", "VARIANTS", "Net", "Run", "build", "kinds_for"]

WORDS, WIDTH, ROWS = 16, 8, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """A model whose pieces can be left out, as for pipeline stages: each keeps its name."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.tokens: nn.Embedding | None = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleDict({str(index): Block() for index in range(2)})
        self.norm: nn.LayerNorm | None = nn.LayerNorm(WIDTH)
        self.out: nn.Linear | None = nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        if tied:
            self.out.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tokens is not None:
            x = self.tokens(x)
        for block in self.layers.values():
            x = block(x)
        if self.norm is not None:
            x = self.norm(x)
        return self.out(x) if self.out is not None else x


@dataclass
class Run:
    """A training run of this rank."""

    parts: list[nn.Module]
    optimizer: torch.optim.Optimizer
    step: Callable[[int], float]
    """Trains on batch n; the loss of the whole batch, the same on all ranks."""


def device() -> torch.device:
    """Where this rank trains: its accelerator if the ranks talk over a backend of its own."""
    accelerator, backends = torch.accelerator.current_accelerator(), dist.get_backend_config()
    if accelerator is None or f"{accelerator.type}:" not in backends or f"{accelerator.type}:gloo" in backends:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.get_device_module(accelerator).current_device())


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(1000 + number)
    words = torch.randint(0, WORDS, (ROWS, 5), generator=made).to(device())
    return words[:, :-1], words[:, 1:]


def mean_loss(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    if isinstance(logits, DTensor):
        logits = logits.full_tensor()
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten())


def _parallel(net: nn.Module, mesh: DeviceMesh) -> None:
    for block in net.layers.values():
        block = getattr(block, "_checkpoint_wrapped_module", block)
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _plain(net: Net, world: int) -> nn.Module:
    return net


def _ddp(net: Net, world: int) -> nn.Module:
    return DistributedDataParallel(net)


def _fsdp1(
    strategy: ShardingStrategy, *, use_orig_params: bool, nested: bool = True
) -> Callable[[Net, int], nn.Module]:
    def wrap(net: Net, world: int) -> nn.Module:
        how: dict[str, Any] = {
            "sharding_strategy": strategy,
            "use_orig_params": use_orig_params,
            "device_id": device(),
        }
        if strategy is ShardingStrategy.HYBRID_SHARD:
            how["device_mesh"] = init_device_mesh(device().type, (max(1, world // 2), min(world, 2)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if nested:
                for name, block in list(net.layers.items()):
                    net.layers[name] = FullyShardedDataParallel(block, **how)
            return FullyShardedDataParallel(net, **how)

    return wrap


def _fsdp2(net: Net, world: int) -> nn.Module:
    return _shard(net, init_device_mesh(device().type, (world,)))


def _shard(net: Net, mesh: DeviceMesh) -> nn.Module:
    for block in net.layers.values():
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def _hsdp(net: Net, world: int) -> nn.Module:
    return _shard(
        net, init_device_mesh(device().type, (max(1, world // 2), min(world, 2)), mesh_dim_names=("copy", "shard"))
    )


def _tp(net: Net, world: int) -> nn.Module:
    _parallel(net, init_device_mesh(device().type, (world,)))
    return net


def _fsdp2_tp(net: Net, world: int) -> nn.Module:
    mesh = init_device_mesh(device().type, (max(1, world // 2), min(world, 2)), mesh_dim_names=("dp", "tp"))
    _parallel(net, mesh["tp"])
    return _shard(net, mesh["dp"])


WRAPPERS: dict[str, Callable[[Net, int], nn.Module]] = {
    "plain": _plain,
    "ddp": _ddp,
    "fsdp1": _fsdp1(ShardingStrategy.FULL_SHARD, use_orig_params=True),
    "fsdp1-flat": _fsdp1(ShardingStrategy.FULL_SHARD, use_orig_params=False),
    "fsdp1-grad-op": _fsdp1(ShardingStrategy.SHARD_GRAD_OP, use_orig_params=True),
    "fsdp1-no-shard": _fsdp1(ShardingStrategy.NO_SHARD, use_orig_params=True),
    "fsdp1-hybrid": _fsdp1(ShardingStrategy.HYBRID_SHARD, use_orig_params=True),
    "fsdp2": _fsdp2,
    "hsdp": _hsdp,
    "tp": _tp,
    "fsdp2-tp": _fsdp2_tp,
}
KINDS = [*WRAPPERS, "pp"]
VARIANTS = ["adamw", "sgd", "empty-group", "frozen", "tied", "compiled", "checkpointed"]
# Optimizers that are tried on few kinds only; Lion is from a package of a third party.
_OTHERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.02),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.002, momentum=0.9, centered=True),
    "adam-amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True, foreach=False),
    "lion": lambda parameters: importlib.import_module("lion_pytorch").Lion(parameters, lr=0.002),
}
OTHERS = [*_OTHERS]
# How the ranks share a batch: as replicas of one job, each a part; or all of it on each.
_SPLITS = {"ddp", "fsdp1", "fsdp1-flat", "fsdp1-grad-op", "fsdp1-no-shard", "fsdp1-hybrid", "fsdp2", "hsdp"}


def kinds_for(variant: str) -> list[str]:
    """The kinds that a variant exists for: a parameter cannot be tied over two stages or two flat parameters."""
    if variant == "tied":
        return [kind for kind in KINDS if kind != "pp"]
    if variant == "frozen":  # one flat parameter is trained as a whole
        return [kind for kind in KINDS if kind != "fsdp1-flat"]
    return KINDS


def build(  # noqa: C901 - one place that says what a run of each kind is
    kind: str, variant: str = "adamw", *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Run:
    """A run on the ranks of the default group. Collective."""
    torch.manual_seed(seed)
    world = dist.get_world_size()
    net = Net(tied=variant == "tied").to(device(), dtype)
    if variant == "frozen":
        for parameter in net.layers["0"].parameters():
            parameter.requires_grad_(False)
    if variant == "checkpointed":
        for name, block in list(net.layers.items()):
            net.layers[name] = checkpoint_wrapper(block)
    if kind == "pp":
        return _pipeline(net, variant)
    model = WRAPPERS[kind](net, world)
    if variant == "compiled":
        model = _compile(model)
    optimizer = make_optimizer(variant, [model])

    def step(number: int) -> float:
        words, wanted = batch(number)
        replicas, place = 1, 0
        if kind in _SPLITS:
            replicas, place = world, dist.get_rank()
        elif kind == "fsdp2-tp":
            replicas, place = max(1, world // 2), dist.get_rank() // min(world, 2)
        rows = slice(place * ROWS // replicas, (place + 1) * ROWS // replicas)
        loss = mean_loss(model(words[rows]), wanted[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        whole = loss.detach() / world
        dist.all_reduce(whole)
        return float(whole)

    return Run([model], optimizer, step)


def _compile(model: nn.Module) -> nn.Module:
    """Wrapped as by `torch.compile`, but not compiled: what is traced is of no interest here."""
    torch.compiler.set_stance("force_eager")
    return torch.compile(model, backend="eager")


def make_optimizer(variant: str, parts: Sequence[nn.Module]) -> torch.optim.Optimizer:
    parameters = [parameter for part in parts for parameter in part.parameters()]
    if variant in _OTHERS:
        return _OTHERS[variant](parameters)
    # PyTorch's fast form on accelerators takes no DTensors beside other tensors.
    foreach = None if len({isinstance(parameter, DTensor) for parameter in parameters}) == 1 else False
    if variant == "sgd":
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, foreach=foreach)
    if variant == "empty-group":
        named = [pair for part in parts for pair in part.named_parameters()]
        groups = [
            {"params": [parameter for name, parameter in named if name.endswith("weight")], "lr": 0.02},
            {"params": [], "lr": 0.5},
            {"params": [parameter for name, parameter in named if not name.endswith("weight")]},
        ]
        return torch.optim.AdamW(groups, lr=0.01, foreach=foreach)
    return torch.optim.AdamW(parameters, lr=0.01, foreach=foreach)


def _pipeline(net: Net, variant: str) -> Run:  # noqa: C901 - forwards and backwards in one place
    """Four stages, dealt to the ranks in turn: two per rank on two ranks. One micro-batch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    stages: list[nn.Module | None] = []
    for number in range(4):
        part = Net()
        part.load_state_dict(net.state_dict(), strict=False)
        part = part.to(device(), net.out.weight.dtype)
        part.tokens = net.tokens if number == 0 else None
        part.layers = nn.ModuleDict({str(number - 1): net.layers[str(number - 1)]} if number in (1, 2) else {})
        part.norm, part.out = (net.norm, net.out) if number == 3 else (None, None)
        if number:
            del part.seen
        made: nn.Module = _compile(part) if variant == "compiled" else part
        stages.append(made if number % world == rank else None)
    parts = [stage for stage in stages if stage is not None]
    optimizer = make_optimizer(variant, parts)
    empty = torch.empty(ROWS, 4, WIDTH, dtype=net.out.weight.dtype, device=device())

    def step(number: int) -> float:
        words, wanted = batch(number)
        ends: list[tuple[torch.Tensor, torch.Tensor] | None] = []
        x: torch.Tensor = words
        loss = torch.zeros((), device=device())
        for index, stage in enumerate(stages):
            if index:
                x = x.detach() if index - 1 in _own(world, rank) else empty.clone()
                dist.broadcast(x, src=(index - 1) % world)
                x.requires_grad_()
            if stage is not None:
                start, x = x, stage(x)
                ends.append((start, x))
            else:
                ends.append(None)
        if ends[3] is not None:
            loss = mean_loss(ends[3][1], wanted)
            loss.backward()
        for index in (2, 1, 0):
            behind = ends[index + 1]
            gradient = empty.clone() if behind is None else behind[0].grad
            assert gradient is not None
            dist.broadcast(gradient, src=(index + 1) % world)
            end = ends[index]
            if end is not None and end[1].requires_grad:
                end[1].backward(gradient)
        optimizer.step()
        optimizer.zero_grad()
        whole = loss.detach().clone()
        dist.broadcast(whole, src=3 % world)
        return float(whole)

    return Run(parts, optimizer, step)


def _own(world: int, rank: int) -> list[int]:
    return [number for number in range(4) if number % world == rank]
