from __future__ import annotations

import pickle
from dataclasses import dataclass

import pytest

from dcp_core.records.metadata import dumps_as


@dataclass
class Ours:
    x: int


@dataclass
class Theirs:
    x: int


class Named(str):
    __slots__ = ()


PATHS: dict[type, tuple[str, str]] = {Ours: (Theirs.__module__, "Theirs")}


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test modules are not importable by name; a pickle needs that."""
    import sys
    import types

    module = types.ModuleType("renamed_records")
    monkeypatch.setitem(sys.modules, "renamed_records", module)
    monkeypatch.setattr(Theirs, "__module__", "renamed_records")
    module.Theirs = Theirs  # type: ignore[attr-defined]
    PATHS[Ours] = ("renamed_records", "Theirs")


@pytest.mark.parametrize("protocol", [None, 0, *range(2, pickle.HIGHEST_PROTOCOL + 1)])
def test_classes_and_states_are_replaced_at_any_depth(protocol: int | None) -> None:
    one = Ours(1)
    data = dumps_as(
        {"a": [one, one, Ours], "b": Named("n"), "c": len},
        paths=PATHS,
        states={Ours: lambda record: {"x": record.x + 1}},
        plain=(Named,),
        protocol=protocol,
    )
    found = pickle.loads(data)
    assert found["a"] == [Theirs(2), Theirs(2), Theirs]
    assert found["a"][0] is found["a"][1]
    assert type(found["b"]) is str
    assert found["c"] is len
    assert data.count(b"Theirs") == 1


def test_subclasses_are_not_replaced() -> None:
    class Sub(Ours):
        pass

    with pytest.raises((pickle.PicklingError, AttributeError)):
        dumps_as(Sub(1), paths=PATHS, states={Ours: vars})
