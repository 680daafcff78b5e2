"""The storage as a second positional argument: taken with a warning, as in stock."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from dcp_core import load, save
from dcp_core.errors import NoCheckpointIdError
from dcp_core.testing.memory import MemoryReader, MemoryWriter


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
@pytest.mark.parametrize("call", [save, load])
def test_nowhere_to_go(call: Any, checkpoint_id: str | None) -> None:
    with pytest.raises(NoCheckpointIdError, match="pass a checkpoint_id or a storage_") as caught:
        call({}, checkpoint_id=checkpoint_id)
    assert isinstance(caught.value, RuntimeError)  # stock's
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("call", [save, load])
@pytest.mark.parametrize("path", ["run/step-1", Path("run/step-1")])
def test_a_path_in_the_storages_place_is_told_its_name(call: Any, path: str | Path) -> None:
    with pytest.raises(TypeError, match=r"'run/step-1' is no storage_\w+: pass checkpoint_id='run/step-1'"):
        call({"step": 1}, path)
