"""Stock as oracle: our state dicts equal stock's, key by key and bit by bit, and each takes what the other gave."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp_state
from dcp_core.errors import DcpError
from dcp_ranks.testing.ranks import RankPool
from integration_tests.state.compare import differences
from integration_tests.state.jobs import stock_modules
from integration_tests.state.nets import KINDS, VARIANTS, build, kinds_for

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
WRAPPED = [kind for kind in KINDS if kind != "pp"]  # for stock each stage is a plain module
CASES = [(kind, [variant for variant in VARIANTS if kind in kinds_for(variant)]) for kind in WRAPPED]
OPTIONS: list[dict[str, Any]] = [
    {"full_state_dict": True},
    {"full_state_dict": True, "cpu_offload": True},
    {"cpu_offload": True},
    {"ignore_frozen_params": True},
]
FLAT = {"flatten_optimizer_state_dict": True}


def _trained(kind: str, variant: str, seed: int = 0) -> Any:
    run = build(kind, variant, seed=seed)
    for number in range(2):
        run.step(number)
    return run


def _compare(kind: str, variants: Sequence[str]) -> dict[str, list[str]]:
    from torch.distributed.checkpoint import state_dict as stock

    found = {}
    for variant in variants:
        run = _trained(kind, variant)
        (model,), optimizer = run.parts, run.optimizer
        options: list[dict[str, Any]] = [{}, *(OPTIONS if variant in ("adamw", "frozen") else [])]
        if not kind.startswith("fsdp1"):
            options.append(FLAT)
        for each in options:
            if kind.startswith("fsdp1") and len(each) == 2:
                continue  # stock reads freed memory here, and dies of it
            ours = dcp_state.get_state_dict(model, optimizer, options=dcp_state.StateDictOptions(**each))
            theirs = stock.get_state_dict(model, optimizer, options=stock.StateDictOptions(**each))
            found[f"{variant} {each}"] = list(differences(list(ours), list(theirs)))
            if list(ours[0]) != list(theirs[0]):
                found[f"{variant} {each}"].append("order of the model's names")
    return found


def _check(results: list[dict[str, list[str]]]) -> None:
    for rank, found in enumerate(results):
        assert found
        assert {case: problems for case, problems in found.items() if problems} == {}, f"rank {rank}"


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("kind", "variants"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_state_dicts_equal_stocks(ranks: RankPool, kind: str, variants: list[str], world: int) -> None:
    if world == 1:
        variants = variants[:1]
    _check(ranks.run(world, _compare, kind, variants))


def _exchange(kind: str) -> list[str]:
    from torch.distributed.checkpoint import state_dict as stock

    first = _trained(kind, "adamw")
    (model,), optimizer = first.parts, first.optimizer
    given = dcp_state.get_state_dict(model, optimizer)
    second = build(kind, "adamw", seed=1)
    copies = [dict(each) for each in given]  # stock changes what it is given
    stock.set_state_dict(second.parts[0], second.optimizer, model_state_dict=copies[0], optim_state_dict=copies[1])
    third = build(kind, "adamw", seed=2)
    theirs = stock.get_state_dict(second.parts[0], second.optimizer)
    dcp_state.set_state_dict(third.parts[0], third.optimizer, model_state_dict=theirs[0], optim_state_dict=theirs[1])
    told = list(differences(list(dcp_state.get_state_dict(third.parts[0], third.optimizer)), list(given)))
    if second.step(2) != third.step(2):
        told.append("the losses after it differ")
    return told


@pytest.mark.parametrize("kind", WRAPPED)
def test_each_takes_what_the_other_gave(ranks: RankPool, kind: str) -> None:
    assert ranks.run(2, _exchange, kind) == [[], []]


def _full_round(kind: str, variant: str) -> list[str]:
    """Whole tensors of rank 0, broadcast into another run; stock's own way back hangs for some, and is not run."""
    first = _trained(kind, variant)
    get = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    given = dcp_state.get_state_dict(first.parts[0], first.optimizer, options=get)
    if dist.get_rank():
        assert given == ({}, {})
    run = build(kind, variant, seed=1)
    options = dcp_state.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    copies = [dict(each) for each in given]
    for _ in range(2):  # the caller's state dicts stay as they are, so the same ones can be set again
        dcp_state.set_state_dict(
            run.parts[0], run.optimizer, model_state_dict=copies[0], optim_state_dict=copies[1], options=options
        )
    told = list(differences(copies, list(given)))
    wanted, found = (dcp_state.get_state_dict(each.parts[0], each.optimizer) for each in (first, run))
    told += differences(list(found), list(wanted))
    if first.step(2) != run.step(2):
        told.append("other losses")
    return told


@pytest.mark.parametrize("kind", ["plain", "ddp", "fsdp1", "fsdp1-flat", "fsdp2", "hsdp", "tp", "fsdp2-tp"])
@pytest.mark.parametrize("variant", ["adamw"])
def test_broadcast_from_rank_0(ranks: RankPool, kind: str, variant: str) -> None:
    assert ranks.run(2, _full_round, kind, variant) == [[], []]


def _no_such_attribute(own: Any, _: Any) -> None:
    own.no_such_attribute  # noqa: B018 - raises


def _refused(wrong: str) -> str:
    """Rank 0's state dict does not fit, or an optimizer refuses it: what this rank is told."""
    run = _trained("fsdp2", "adamw")
    get = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    model, optimizer = dcp_state.get_state_dict(run.parts[0], run.optimizer, options=get)
    (part,), own = run.parts, run.optimizer
    wrongs: dict[str, Callable[[], Any]] = {
        "shape": lambda: model.update({"norm.weight": torch.ones(3)}),
        "missing": lambda: model.pop("norm.weight"),
        "optimizer": lambda: [optimizer.clear(), optimizer.update(nonsense=1)],
        "one optimizer": lambda: own.register_load_state_dict_pre_hook(_no_such_attribute),
        "one model": lambda: part.register_load_state_dict_post_hook(_no_such_attribute),
    }
    if dist.get_rank() == wrong.startswith("one"):
        wrongs.get(wrong, int)()
        part = own if wrong == "one module" else part
        own = part if wrong == "one wrapper" else own
        model = None if wrong == "one state dict" else model
    options = dcp_state.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    told = "nothing"
    for _ in range(2):  # the ranks still call the same collectives in the same order
        try:
            dcp_state.set_state_dict(part, own, model_state_dict=model, optim_state_dict=optimizer, options=options)
        except DcpError as error:
            told = str(error)
    return told


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("shape", "norm.weight"),
        ("missing", "norm.weight"),
        ("optimizer", "nonsense"),
        ("one state dict", "a NoneType"),
        ("one module", "modules"),
        ("one wrapper", "is no torch.optim.Optimizer"),
        ("one optimizer", "no_such_attribute"),
        ("one model", "no_such_attribute"),
    ],
)
def test_all_ranks_are_told_what_is_wrong_on_one(ranks: RankPool, wrong: str, told: str) -> None:
    for message in ranks.run(2, _refused, wrong):
        assert told in message


def _full_to_all(kind: str) -> list[str]:
    """Whole tensors on every rank, set without communication."""
    first = _trained(kind, "adamw")
    options = dcp_state.StateDictOptions(full_state_dict=True)
    given = dcp_state.get_state_dict(first.parts[0], first.optimizer, options=options)
    run = build(kind, "adamw", seed=1)
    dcp_state.set_state_dict(
        run.parts[0], run.optimizer, model_state_dict=given[0], optim_state_dict=given[1], options=options
    )
    wanted, found = (dcp_state.get_state_dict(each.parts[0], each.optimizer) for each in (first, run))
    return list(differences(list(found), list(wanted)))


@pytest.mark.parametrize("kind", WRAPPED)
def test_whole_tensors_set_on_every_rank(ranks: RankPool, kind: str) -> None:
    assert ranks.run(2, _full_to_all, kind) == [[], []]


def _imports(kind: str) -> list[str]:
    """On processes that have not met stock yet."""
    before = stock_modules()
    if before:
        return []
    run = _trained(kind, "adamw")
    for options in (dcp_state.StateDictOptions(), dcp_state.StateDictOptions(full_state_dict=True)):
        given = dcp_state.get_state_dict(run.parts[0], run.optimizer, options=options)
        dcp_state.set_state_dict(
            run.parts[0], run.optimizer, model_state_dict=given[0], optim_state_dict=given[1], options=options
        )
    return stock_modules()


@pytest.mark.parametrize("kind", ["fsdp2-tp", pytest.param("fsdp1-flat", marks=pytest.mark.slow)])
def test_stock_is_not_imported(kind: str) -> None:
    with RankPool(max_ranks=2) as fresh:
        assert fresh.run(2, _imports, kind) == [[], []]


def test_a_dtensor_of_stock_is_what_is_compared(ranks: RankPool) -> None:
    """The comparison itself can fail."""
    one = {"a": torch.ones(2), "b": [1]}
    assert list(differences({"a": torch.ones(2), "b": [2]}, one)) == [".b.0: 2, theirs 1"]
    assert list(differences({"a": torch.zeros(2), "b": [1]}, one))
    assert list(differences({"b": [1]}, one)) == [".a only theirs"]


SETTINGS: list[dict[str, Any]] = [
    {},
    {"strict": False},
    {"ignore_frozen_params": True},
    {"full_state_dict": True},
    {"full_state_dict": True, "broadcast_from_rank0": True},
]


def _whole(run: Any) -> Any:
    options = dcp_state.StateDictOptions(full_state_dict=True)
    return copy.deepcopy(dcp_state.get_state_dict(run.parts[0], run.optimizer, options=options))


def _after_setting(api: Any, given: Any, run: Any, before: Any, options: dict[str, Any]) -> tuple[bool, bool, bool]:
    """Whether setting raised, and whether it changed the model and the optimizer, which are then as before."""
    (model,), optimizer = run.parts, run.optimizer
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    raised = False
    try:
        states = {"model_state_dict": dict(given[0]), "optim_state_dict": dict(given[1])}
        api.set_state_dict(model, optimizer, **states, options=api.StateDictOptions(**options))
    except RuntimeError:  # ours are that, too
        raised = True
    after = _whole(run)
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    return raised, *(any(differences(one, other)) for one, other in zip(after, before, strict=True))


def _set_with_empty_parts(kind: str) -> list[str]:
    from torch.distributed.checkpoint import state_dict as stock

    told = []
    run = _trained(kind, "adamw")
    targets = [(api, _trained(kind, "adamw", seed=1)) for api in (stock, dcp_state)]
    before = _whole(targets[0][1])  # both are equal, and are set back after each case
    for options in SETTINGS:
        whole = dcp_state.StateDictOptions(full_state_dict=options.get("full_state_dict", False))
        full = copy.deepcopy(dcp_state.get_state_dict(run.parts[0], run.optimizer, options=whole))
        for given in (({}, full[1]), (full[0], {}), ({}, {}), full):
            if not given[1] and options.get("broadcast_from_rank0"):
                continue  # stock takes it for success; ours says that nothing is there
            theirs, ours = (_after_setting(api, given, target, before, options) for api, target in targets)
            if theirs != ours:
                told.append(f"{options}, {[*map(bool, given)]}: {ours}, stock {theirs} (raised, model, optimizer)")
    return told


def test_an_empty_part_is_left_alone_or_refused_as_by_stock(ranks: RankPool) -> None:
    assert ranks.run(2, _set_with_empty_parts, "fsdp2") == [[], []]
