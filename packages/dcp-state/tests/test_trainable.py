"""Trainable-only state, in one process, over storage in memory; and the digests of frozen values, box by box."""

from __future__ import annotations

import copy
import itertools
import json
import logging
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dcp_core import LoadMismatchError, load, save
from dcp_core.shards.shards import LocalShard
from dcp_state import StateMismatchError, TrainableOnly, app_state
from dcp_state.base_model import BaseModel, _part
from integration_tests.kits.memory import MemoryReader, MemoryWriter


class Net(nn.Module):
    """A frozen body, a trained head, a buffer."""

    def __init__(self, seed: int, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6, affine=False)
        self.head = nn.Linear(6, 2)
        self.last = nn.Linear(6, 6, bias=False)
        if tied:
            self.last.weight = self.body.weight
        for part in (self.body, self.last):
            part.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.last(self.body(x))))


TRAINED = ["head.weight", "head.bias"]
BUFFERS = ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]


def run(seed: int, *, base: int = 0, tied: bool = False, every: bool = False) -> tuple[Net, torch.optim.Optimizer]:
    """A run that began with `seed`, on the frozen values of `base`."""
    net, of_base = Net(seed, tied=tied), Net(base, tied=tied)
    for name in ("body", "last"):
        getattr(net, name).load_state_dict(getattr(of_base, name).state_dict())
    parameters = net.parameters() if every else net.head.parameters()
    return net, torch.optim.AdamW(parameters, lr=0.1)


def train(net: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = net(torch.linspace(0, 1, 24).reshape(4, 6)).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("every", [False, True], ids=["optimizer of the head", "optimizer of all"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_run_resumes_on_its_base(request: pytest.FixtureRequest, tied: bool, every: bool, compiled: bool) -> None:
    net, optimizer = run(1, tied=tied, every=every)
    train(net, optimizer)
    state = app_state(net, optimizer, trainable_only=True, step=1)
    assert {*state.state_dict()["model"]} == {*TRAINED, *BUFFERS}
    assert [*state.state_dict()["optimizer"]["hyperparameters"]] == TRAINED
    save({"app": state}, storage_writer=MemoryWriter(request.node.name))
    wanted = [train(net, optimizer) for _ in range(3)]

    net, optimizer = run(2, tied=tied, every=every)
    wrapped = torch.compile(net, backend="eager") if compiled else net
    app = app_state(wrapped, optimizer, trainable_only=True, step=0)
    load({"app": app}, storage_reader=MemoryReader(request.node.name))
    assert app["step"] == 1
    assert not app.report.initialised
    assert not set(app.report.restored) & {"body.weight", "last.weight"}
    assert [train(net, optimizer) for _ in range(3)] == wanted


def test_another_base_is_refused_by_name(request: pytest.FixtureRequest) -> None:
    net, optimizer = run(1)
    saved = app_state(net, optimizer, trainable_only=TrainableOnly(base="mine/small"))
    save({"app": saved}, storage_writer=MemoryWriter(request.node.name))
    net, optimizer = run(1, base=7)
    app = app_state(net, optimizer, trainable_only=TrainableOnly(base="mine/large"))
    with pytest.raises(StateMismatchError, match=r"trained on mine/small .*3 of 3 .*has mine/large") as caught:
        load({"app": app}, storage_reader=MemoryReader(request.node.name))
    wanted = f"'body.bias': saved {zlib.crc32(run(1)[0].body.bias.numpy().tobytes()):08x}, found "
    assert wanted in str(caught.value)


def test_a_single_changed_element_is_another_base(request: pytest.FixtureRequest) -> None:
    net, optimizer = run(1)
    app = app_state(net, optimizer, trainable_only=True)
    save({"app": app}, storage_writer=MemoryWriter(request.node.name))
    with torch.no_grad():
        net.last.weight[3, 3] += 1
    with pytest.raises(StateMismatchError, match="1 of 3 frozen tensors"):
        load({"app": app}, storage_reader=MemoryReader(request.node.name))
    save({"app": app}, storage_writer=MemoryWriter(request.node.name + "again"))
    load({"app": app}, storage_reader=MemoryReader(request.node.name + "again"))


UNCOUNTED: dict[str, Callable[[torch.Tensor], object]] = {
    "data": lambda weight: weight.data.add_(1),
    "NumPy": lambda weight: np.add(weight.numpy(), 1, out=weight.numpy()),
    "another tensor of its memory": lambda weight: torch.from_dlpack(weight).mul_(2),
}


@pytest.mark.parametrize("how", UNCOUNTED)
def test_changes_that_torch_does_not_count_make_another_base(request: pytest.FixtureRequest, how: str) -> None:
    """As adapters do that are merged into their base."""
    net, optimizer = run(1)
    app = app_state(net, optimizer, trainable_only=True)
    save({"app": app}, storage_writer=MemoryWriter(request.node.name))
    before = net.body.weight._version
    UNCOUNTED[how](net.body.weight.detach())
    save({"app": app}, storage_writer=MemoryWriter(request.node.name + "again"))
    assert net.body.weight._version == before
    fresh = app_state(*run(1), trainable_only=True)
    with pytest.raises(StateMismatchError, match="1 of 3 frozen tensors"):
        load({"app": fresh}, storage_reader=MemoryReader(request.node.name + "again"))


def test_digests_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    net, optimizer = run(1)
    read: list[str] = []
    monkeypatch.setattr("dcp_state.base_model._part", lambda name, *rest: read.append(name) or _part(name, *rest))
    for _ in range(3):
        train(net, optimizer)
        app_state(net, optimizer, trainable_only=True).state_dict()
    assert read == ["body.bias", "body.weight", "last.weight"]
    app_state(run(1)[0], trainable_only=TrainableOnly(digest=False)).state_dict()
    assert len(read) == 3


def test_a_trainable_value_that_the_checkpoint_lacks_is_an_error(request: pytest.FixtureRequest) -> None:
    net, optimizer = run(1)
    save({"app": app_state(net, optimizer, trainable_only=True)}, storage_writer=MemoryWriter(request.node.name))
    net, _ = run(1)
    net.body.requires_grad_()
    app = app_state(net, torch.optim.AdamW(net.parameters()), trainable_only=True)
    with pytest.raises(LoadMismatchError, match=r"app\.model\.body\.weight"):
        load({"app": app}, storage_reader=MemoryReader(request.node.name))


@pytest.mark.filterwarnings("ignore:5 key:UserWarning")
def test_a_value_that_was_trained_and_is_frozen_now_is_named(request: pytest.FixtureRequest) -> None:
    net, optimizer = run(1)
    save({"app": app_state(net, optimizer, trainable_only=True)}, storage_writer=MemoryWriter(request.node.name))
    net, _ = run(1)
    net.head.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([net.head.bias])
    with pytest.raises(StateMismatchError, match=r"'head\.weight' is frozen here, but was not"):
        load({"app": app_state(net, optimizer, trainable_only=True)}, storage_reader=MemoryReader(request.node.name))
    app = app_state(net, optimizer, trainable_only=True, strict=False)
    load({"app": app}, storage_reader=MemoryReader(request.node.name))


def test_what_was_trained_before_it_was_frozen_is_saved(request: pytest.FixtureRequest) -> None:
    net, optimizer = run(1)
    train(net, optimizer)
    net.head.weight.requires_grad_(False)
    state = app_state(net, optimizer, trainable_only=True)
    assert {*state.state_dict()["model"]} == {*TRAINED, *BUFFERS}
    save({"app": state}, storage_writer=MemoryWriter(request.node.name))
    other, optimizer = run(2)
    load({"app": app_state(other, optimizer, trainable_only=True)}, storage_reader=MemoryReader(request.node.name))
    assert torch.equal(other.head.weight, net.head.weight)


def test_buffers_may_be_left_out(request: pytest.FixtureRequest) -> None:
    net, optimizer = run(1)
    train(net, optimizer)
    only = TrainableOnly(buffers=False)
    assert [*app_state(net, optimizer, trainable_only=only).state_dict()["model"]] == TRAINED
    save({"app": app_state(net, optimizer, trainable_only=only)}, storage_writer=MemoryWriter(request.node.name))
    other, optimizer = run(2)
    load({"app": app_state(other, optimizer, trainable_only=only)}, storage_reader=MemoryReader(request.node.name))
    assert torch.equal(other.head.weight, net.head.weight)
    assert not torch.equal(other.norm.running_mean, net.norm.running_mean)


def test_the_base_is_named_by_the_configuration() -> None:
    net, _ = run(1)
    net.body.config = type("Config", (), {"_name_or_path": "hub/encoder"})()  # type: ignore[assignment]
    text = app_state(net, trainable_only=True).state_dict()["base_model"]
    assert json.loads(text)["name"] == "hub/encoder"
    assert BaseModel.from_text(text).as_text() == text


TEXT = BaseModel("hub/encoder", {"body.weight": "0123abcd"}).as_text()
FOREIGN = {
    "another type": [None, 3, 1.5, True, [1], {"name": "x"}, b"\xff\xfe", torch.ones(3)],
    "no JSON": ["", "hub/encoder", "<html>", "\0", "\ufeff" + TEXT, TEXT[:-5], TEXT.encode("utf-16").decode("latin1")],
    "another value": ["null", "7", "[]", "false", '"x"', "{}", '{"base_model_name_or_path": "x", "peft_type": "LORA"}'],
    "an entry is missing": ['{"name": "x"}', '{"tensors": {}}'],
    "deep": ["[" * 100_000 + "]" * 100_000, '{"name": "x", "tensors": ' + '{"a":' * 100_000 + "1" + "}" * 100_001],
    "a long number": ['{"name": "x", "tensors": ' + "9" * 10_000 + "}"],
    "wrong name": [json.dumps({"name": name, "tensors": None}) for name in (3, ["x"], {"x": "y"}, float("nan"))],
    "wrong tensors": [json.dumps({"name": None, "tensors": each}) for each in ([], ["x"], "abc", 5, False)],
    "wrong digests": [
        json.dumps({"name": None, "tensors": {"body.weight": each}})
        for each in (7, None, {"crc": 1}, "0123ABCD", "0123abcd0", "0123abcd\n", "0123abc", "")
    ],
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_text_that_describes_no_base_is_named(kind: str) -> None:
    net, _ = run(1)
    app = app_state(net, trainable_only=True)
    state = app.state_dict()
    for text in FOREIGN[kind]:
        with pytest.raises(StateMismatchError, match="'base_model' describes no base model"):
            app.load_state_dict({**state, "base_model": text})
    del state["base_model"]
    with pytest.raises(StateMismatchError, match="'base_model' describes no base model"):
        app.load_state_dict(state)


WRONG = {
    "no base": {"base_model": "x"},
    "another base": {
        "base_model": BaseModel(None, dict.fromkeys(["body.weight", "last.weight"], "01234567")).as_text()
    },
    "no scheduler": {"schedulers": ()},
    "two schedulers": {"schedulers": ({}, {})},
}


def leaves(app: Any) -> list[Any]:
    found = torch.utils._pytree.tree_leaves(app.state_dict())
    return [each.tolist() if isinstance(each, torch.Tensor) else each for each in found]


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("trainable_only", [True, False])
def test_nothing_is_restored_if_the_base_or_the_schedulers_differ(wrong: str, trainable_only: bool) -> None:
    if not trainable_only and "base_model" in WRONG[wrong]:
        return
    apps = []
    for seed in (1, 2):
        net, optimizer = run(seed)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        for _ in range(seed):
            train(net, optimizer)
            scheduler.step()
        apps.append(app_state(net, optimizer, scheduler=scheduler, trainable_only=trainable_only, step=seed))
    other, app = apps
    before = leaves(app)
    with pytest.raises(StateMismatchError):
        app.load_state_dict({**copy.deepcopy(other.state_dict()), **WRONG[wrong]})
    assert leaves(app) == before
    app.load_state_dict(copy.deepcopy(other.state_dict()))
    assert leaves(app) == leaves(other)


def test_names_in_the_text_are_printable_and_unknown_entries_ignored() -> None:
    app = app_state(run(1)[0], trainable_only=True)
    state = app.state_dict()
    base = json.loads(state["base_model"])
    app.load_state_dict({**state, "base_model": json.dumps({**base, "since": 2, "digest": None})})
    tensors = dict.fromkeys([*base["tensors"], "\ud800"], "01234567")
    for name in ("\x1b[2J" + "n" * 10_000, "\ud800"):
        with pytest.raises(StateMismatchError, match="frozen tensors of this model differ") as caught:
            app.load_state_dict({**state, "base_model": json.dumps({"name": name, "tensors": tensors})})
        assert len(str(caught.value)) < 1000
        assert str(caught.value).replace("\n", "").replace("…", "").isascii()
        assert "\x1b" not in str(caught.value)


def test_names_are_reserved_only_where_they_are_used() -> None:
    net, _ = run(1)
    assert app_state(net, base_model=3)["base_model"] == 3
    with pytest.raises(ValueError, match="'base_model'"):
        app_state(net, base_model=3, trainable_only=True)


def test_frozen_values_in_every_checkpoint_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    def messages(**options: Any) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                app_state(big, optimizer, **options)
        return [record.getMessage() for record in caplog.records]

    big = nn.Sequential(nn.Linear(60, 60), nn.Linear(60, 1))
    big[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(big[1].parameters())
    assert messages(trainable_only=True) == messages(trainable_only=False) == []
    (message,) = messages()
    assert message.startswith("98 % of the model's bytes are frozen")
    big[0].requires_grad_()
    big = nn.Sequential(*big)
    assert messages() == []


@st.composite
def tensors_in_boxes(draw: st.DrawFn) -> tuple[torch.Tensor, list[LocalShard]]:
    """A tensor, and boxes that divide it, cut as a rank's shards may be."""
    sizes = draw(st.lists(st.integers(0, 5), max_size=4))
    dtype = draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.complex128]))
    made = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    whole = torch.randint(0, 100, sizes, generator=made).to(dtype)
    boxes = [((0,) * len(sizes), tuple(sizes))]
    for dim, extent in enumerate(sizes):
        cuts = sorted(draw(st.sets(st.integers(0, extent), max_size=2)))
        edges = [0, *cuts, extent]
        boxes = [
            ((*offsets[:dim], begin, *offsets[dim + 1 :]), (*lengths[:dim], end - begin, *lengths[dim + 1 :]))
            for offsets, lengths in boxes
            for begin, end in itertools.pairwise(edges)
        ]

    def shard(offsets: tuple[int, ...], lengths: tuple[int, ...]) -> LocalShard:
        part = whole
        for dim, (begin, length) in enumerate(zip(offsets, lengths, strict=True)):
            part = part.narrow(dim, begin, length)
        return LocalShard(torch.Size(offsets), torch.Size(lengths), lambda: part)

    return whole, [shard(*box) for box in boxes]


@given(tensors_in_boxes())
@settings(deadline=None, max_examples=200)
def test_parts_of_boxes_make_up_the_crc_of_the_bytes(drawn: tuple[torch.Tensor, list[LocalShard]]) -> None:
    whole, shards = drawn
    joined = 0
    for shard in shards:
        joined ^= _part("x", shard, whole.shape)
    data = whole.contiguous().flatten().view(torch.uint8).numpy().tobytes() if whole.numel() else b""
    assert joined == zlib.crc32(data)
