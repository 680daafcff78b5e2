"""What is observed of a training: state behind attributes, closures and generators, random states, and batches."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

from dcp_prove import prove_resume
from dcp_prove.observing.batches import _ids_of
from dcp_prove.observing.crawl import Crawl
from dcp_prove.observing.fingerprint import fingerprint
from dcp_prove.trainer import check_trainer, read_step


class Holder:
    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


def kinds(value: Any, *, full: bool = True) -> dict[str, str]:
    return {name: kind for name, (kind, _) in Crawl({"t": value}, full=full).found.items()}


def test_state_is_found_wherever_it_is_held() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.BatchNorm1d(1, affine=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 1)).sum().backward()
    optimizer.step()
    counter = {"seen": 3}

    def stream() -> Any:
        position = 5
        yield position

    started = stream()
    next(started)
    loop = functools.partial(lambda _: (model, counter), None)
    found = kinds(
        Holder(
            loop=loop,
            optimizer=optimizer,
            scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1),
            stream=started,
            ema={"weight": torch.ones(1)},
            scaler=torch.amp.GradScaler("cpu"),
            rng=np.random.default_rng(0),
            loader=DataLoader([1, 2], sampler=RandomSampler([1, 2], generator=torch.Generator())),
        )
    )
    assert found["t.loop.func.model.0.weight"] == "parameter"
    assert found["t.loop.func.model.0.weight.grad"] == "gradient"
    assert found["t.loop.func.model.1.running_mean"] == "batchnorm"
    assert found["t.loop.func.counter['seen']"] == "value"
    assert found["t.optimizer.state[t.loop.func.model.0.weight].momentum_buffer"] == "optimizer"
    assert found["t.optimizer.param_groups[0].lr"] == "optimizer"
    assert found["t.scheduler.last_epoch"] == "scheduler"
    assert found["t.scaler.scale"] == "scaler"
    assert found["t.stream.position"] == "value"
    assert found["t.ema['weight']"] == "average"
    assert found["t.rng"] == "generator"
    assert found["t.loader.sampler.generator"] == "generator"


def test_what_several_groups_reach_has_the_name_of_the_first() -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    found = Crawl({"trainer": Holder(fit=Holder(model=model))}, {"self": model, "step": 1}, full=True).found
    assert {*found} == {"trainer.fit.model.weight", "step"}


@pytest.mark.parametrize(
    ("drawn", "ids"),
    [
        (3, [3]),
        ([3, 1], [3, 1]),
        (torch.tensor(4), [4]),
        ([None], []),
        (Holder(indices=[5, 2], epoch=1, lanes=None), [5, 2]),  # of a sampler of dcp_data
        (Holder(indices=[5, 6], epoch=1, lanes=Holder()), ["1/5", "1/6"]),  # of a stream: places in an epoch
    ],
)
def test_ids_of_samples_are_seen_by_what_is_drawn(drawn: Any, ids: list[Any]) -> None:
    assert _ids_of(drawn) == ids


def test_without_tensors_it_is_light() -> None:
    model = torch.nn.Linear(2, 2)
    assert kinds(Holder(model=model, step=3, tensor=torch.ones(2)), full=False) == {"t.step": "value"}


def test_circles_end() -> None:
    one = Holder()
    one.other = Holder(back=one, number=1)  # type: ignore[attr-defined]
    assert kinds(one) == {"t.other.number": "value"}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)), (torch.zeros(2), -torch.zeros(2)),
        (torch.zeros(2, 1), torch.zeros(1, 2)), (1, 1.0), (True, 1), ([1], (1,)), ("1", 1), (np.zeros(1), np.ones(1)),
        ({"a": 1}, {"b": 1}), (torch.zeros(0), torch.zeros(0, 2)), (0.0, -0.0),
    ],
)  # fmt: skip
def test_fingerprints_differ(one: Any, other: Any) -> None:
    assert fingerprint(one) != fingerprint(other)
    assert fingerprint(one) == fingerprint(one)


def test_results_of_steps_are_read() -> None:
    assert read_step(torch.tensor(2.0, requires_grad=True)) == (2.0, None)
    assert read_step({"loss": 1, "samples": torch.tensor([3, 4])}) == (1.0, [3, 4])
    assert read_step(None) == (None, None)
    with pytest.raises(TypeError, match="a number or a tensor of one element"):
        read_step(torch.ones(2))


def test_a_trainer_without_methods_is_refused() -> None:
    with pytest.raises(TypeError, match=r"a Holder without save\(\), restore\(\)"):
        check_trainer(Holder(step=lambda: None))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((lambda root: root, 4, 2), TypeError, "top level of a module"),
        ((3, 4, 2), TypeError, "must be a function"),
        ((Holder, 4, 4), ValueError, "less than steps"),
        ((Holder, 4, [0]), ValueError, "at least 1"),
        ((Holder, 4, 2, ()), ValueError, "world_sizes"),
    ],
)
def test_wrong_arguments_are_refused(arguments: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        prove_resume(*arguments)
