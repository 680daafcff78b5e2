"""Views of every kind through every saver, while their memory is exchanged from save to save, as offloading does."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dcp_all as dcp
from dcp_async import AsyncSaver
from dcp_core import DefaultSavePlanner, UnsupportedValueError
from integration_tests.oracle.kinds import DTYPES, filled
from integration_tests.states.random_states import loaded, random_view
from integration_tests.states.test_random_states import unlike

SAVES = 4
State = dict[str, torch.Tensor]


class OwnPlanner(DefaultSavePlanner):
    """A planner of the caller's own, which sees tensors rather than what stands for them."""

    def lookup_object(self, index: Any) -> Any:
        """As the default one."""
        return super().lookup_object(index)


@pytest.fixture(scope="module")
def savers() -> Iterator[dict[str, Callable[..., None]]]:
    """How to save, by name; the savers know what they have saved before."""
    with AsyncSaver("thread") as thread, AsyncSaver("process") as process:
        yield {
            "sync": lambda state, **how: dcp.save(state, no_dist=True, **how),
            "thread": lambda state, **how: thread.save(state, no_dist=True, **how).result(),  # type: ignore[union-attr]
            "process": lambda state, **how: process.save(state, no_dist=True, **how).result(),  # type: ignore[union-attr]
        }


def _view(draw: random.Random) -> torch.Tensor:
    shape = tuple(draw.choices(range(1, 7), k=draw.randrange(4)))
    return random_view(filled(shape, draw.choice(DTYPES), draw.randrange(99)), draw, 4)


def _other_memory(state: State, name: str, draw: random.Random) -> None:
    state[name].data = random_view(filled((3, 4), state[name].dtype, draw.randrange(99)), draw)


def _moved(state: State, name: str, draw: random.Random) -> None:
    """Offload: the values are elsewhere, and something else is where they were."""
    old = state[name].data
    state[name].data = old.clone()
    _bytes(old).zero_()


def _turned(state: State, name: str, draw: random.Random) -> None:
    state[name].data = state[name].data.permute([*reversed(range(state[name].dim()))])


def _other_values(state: State, name: str, draw: random.Random) -> None:
    _bytes(state[name]).bitwise_xor_(1)


def _another(state: State, name: str, draw: random.Random) -> None:
    state[name] = _view(draw)


def _tied(state: State, name: str, draw: random.Random) -> None:
    state[name] = random_view(state[draw.choice([*state])], draw, draw.choice([0, 2]))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All memory of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


CHANGES = (_other_memory, _moved, _turned, _other_values, _another, _tied)


@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
@pytest.mark.parametrize("planner", [None, OwnPlanner])
@pytest.mark.parametrize("kind", ["sync", "thread", "process"])
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_what_is_stored_is_what_the_views_showed(
    savers: dict[str, Callable[..., None]], tmp_path: Path, kind: str, planner: Any, seed: int
) -> None:
    draw = random.Random(seed)
    state = {f"{number}": _view(draw) for number in range(8)}
    for number in range(SAVES):
        place = tmp_path / f"{seed}-{number}"
        savers[kind](state, checkpoint_id=place, planner=planner and planner())
        found = dcp.load_keys(checkpoint_id=place, no_dist=True)
        assert [*unlike(found, {name: loaded(tensor) for name, tensor in state.items()}, "")] == []
        for name in draw.sample([*state], 3):
            draw.choice(CHANGES)(state, name, draw)


LOOK_ALIKES: list[tuple[Any, Any]] = [
    (0.0, -0.0), (complex(0.0, 0.0), complex(-0.0, -0.0)), (1, True), (1, 1.0), ("a", b"a"), (None, False),
    ((1,), (True,)), ({0.0: 1}, {-0.0: 1}), ({1: 1}, {True: 1}), (filled((1,), torch.float32), filled((1,), seed=1)),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["sync", "thread", "process"])
def test_a_value_that_only_looks_alike_is_saved_anew(
    savers: dict[str, Callable[..., None]], tmp_path: Path, kind: str
) -> None:
    """Beside a tensor that does not change, so that the structure is known."""
    weight = torch.ones(3)
    for turn in (0, 1, 0):
        state = {f"v{number}": pair[turn] for number, pair in enumerate(LOOK_ALIKES)} | {"weight": weight}
        savers[kind](state, checkpoint_id=tmp_path / "x")
        wanted = tmp_path / "wanted"
        dcp.save(state, checkpoint_id=wanted, no_dist=True)
        found, sound = (dcp.load_keys(checkpoint_id=place, no_dist=True) for place in (tmp_path / "x", wanted))
        assert [*unlike(found, sound, "")] == []
        plain = {name: value for name, value in state.items() if not isinstance(value, dict)}
        assert [*unlike({name: found[name] for name in plain}, plain, "")] == []


@pytest.mark.parametrize("kind", ["sync", "thread", "process"])
def test_freed_memory_is_refused_and_the_next_save_works(
    savers: dict[str, Callable[..., None]], tmp_path: Path, kind: str
) -> None:
    """FSDP frees what it has gathered; nothing of that memory may be read."""
    weight = torch.nn.Parameter(torch.arange(100_000.0))
    savers[kind]({"m": {"w": weight}}, checkpoint_id=tmp_path / "1")
    weight.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedValueError, match=r"'m\.w'.*freed or resized"):
        savers[kind]({"m": {"w": weight}}, checkpoint_id=tmp_path / "2")
    assert not (tmp_path / "2" / ".metadata").exists()
    weight.data = torch.ones(100_000)
    savers[kind]({"m": {"w": weight}}, checkpoint_id=tmp_path / "2")
    assert dcp.load_keys(checkpoint_id=tmp_path / "2", no_dist=True)["m"]["w"].sum() == 100_000
