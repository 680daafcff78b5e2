"""The storage as a second positional argument: taken with a warning, as in stock."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_core import estimate, load, save
from dcp_core.calls import without_positional_path
from dcp_core.errors import PluginNotFoundError, UnsupportedValueError
from integration_tests.kits.memory import MemoryReader, MemoryWriter


def test_old_calls_work_with_a_warning(tmp_path: Path) -> None:
    old_save: Any = save
    old_load: Any = load
    place = str(tmp_path)
    with pytest.warns(UserWarning, match="argument order of save has changed: pass storage_writer= by name") as warned:
        old_save({"a": 1}, MemoryWriter(place))
    assert warned[0].filename == __file__
    state = {"a": 0}
    with pytest.warns(UserWarning, match="argument order of load has changed"):
        old_load(state, MemoryReader(place))
    assert state == {"a": 1}


def test_what_old_calls_cannot_say() -> None:
    old_save: Any = save
    with pytest.raises(TypeError, match="twice"):
        old_save({}, MemoryWriter("x"), storage_writer=MemoryWriter("x"))
    with pytest.raises(TypeError, match="positional"):
        old_save({}, MemoryWriter("x"), None)
    assert inspect.signature(save).parameters["storage_writer"].kind is inspect.Parameter.KEYWORD_ONLY


@pytest.mark.parametrize("checkpoint_id", [None, ""])
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (save, "no place to save to: pass checkpoint_id=.* or storage_writer="),
        (load, "no place to load from: pass checkpoint_id=.* or storage_reader="),
    ],
)
def test_nowhere_to_go(call: Any, message: str, checkpoint_id: str | None) -> None:
    with pytest.raises(PluginNotFoundError, match=message) as caught:
        call({}, checkpoint_id=checkpoint_id)
    assert isinstance(caught.value, RuntimeError)  # stock's


@pytest.mark.parametrize("call", [save, load])
@pytest.mark.parametrize("path", ["run/step-1", Path("run/step-1")])
def test_a_path_in_the_storages_place_is_told_its_name(call: Any, path: str | Path) -> None:
    with pytest.raises(TypeError, match=r"'run/step-1' is not a storage_\w+: pass checkpoint_id='run/step-1'"):
        call({"step": 1}, path)


@pytest.mark.parametrize("call", [save, load, estimate])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.nn.Linear(1, 1), r"not a Linear: pass \{'model': model\}, or model.state_dict\(\)"),
        ([1], r"not a list: pass a dict"),
        ("run/step-1", "the first argument is the state dict, and 'run/step-1' is a path: pass it as checkpoint_id="),
        (Path("run/step-1"), "'run/step-1' is a path"),
    ],
)
def test_what_is_no_state_dict_matters_more_than_a_missing_id(call: Any, value: object, message: str) -> None:
    with pytest.raises(UnsupportedValueError, match=message):
        call(value)


@pytest.mark.parametrize("call", [save, load])
def test_path_and_state_dict_in_the_wrong_order(call: Any) -> None:
    with pytest.raises(
        TypeError, match=r"a state dict is not a storage_.*: pass it first, and the path as checkpoint_id="
    ):
        call("run/step-1", {"step": 1})


def test_estimate_takes_no_path_or_writer_for_a_saver() -> None:
    call: Any = estimate
    with pytest.raises(TypeError, match=r"estimate\(\): 'run/step-1' is not a saver: pass checkpoint_id='run/step-1'"):
        call({"step": 1}, Path("run/step-1"))
    with pytest.raises(TypeError, match="a MemoryWriter is not a saver; pass a storage writer as storage_writer="):
        call({"step": 1}, MemoryWriter("x"))


def test_a_path_after_the_last_positional_parameter_is_told_its_name() -> None:
    @without_positional_path
    def call(state_dict: dict[str, Any], *, checkpoint_id: str = "") -> str:
        return f"{state_dict}{checkpoint_id}"

    old: Any = call
    assert old({}, checkpoint_id="x") == "{}x"
    with pytest.raises(TypeError, match=r"^call\(\): 'run/step-1' needs its name: pass checkpoint_id='run/step-1'$"):
        old({}, "run/step-1")
    with pytest.raises(TypeError, match="takes 1 positional argument but 2 were given"):
        old({}, 5)
