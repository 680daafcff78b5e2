"""Canonical names of a model, in one process."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from dcp_base.hookspecs import hookimpl
from dcp_core import plugins
from dcp_core.errors import UnsupportedValueError
from dcp_state import Layer, ModuleAdapter, get_model_state_dict, set_model_state_dict
from dcp_state.canonical_names import name_model, name_models


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(3.0))
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("lost", torch.zeros(2), persistent=False)

    def get_extra_state(self) -> Any:
        return {"version": 1}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"version": 1}


class Wrapper(nn.Module):
    """A third party's wrapper, whose attribute name is in the keys."""

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        self.inside = wrapped


class WrapperAdapter(ModuleAdapter):
    def handles(self, kind: type[nn.Module]) -> bool:
        return issubclass(kind, Wrapper)

    def layer(self, module: nn.Module) -> Layer:
        return Layer("inside", in_keys=True)


def test_names_what_a_state_dict_holds() -> None:
    model = nn.ModuleDict({"a": Inner(), "b": checkpoint_wrapper(Inner())})
    names = name_model(model)
    wanted = [f"{part}.{name}" for part in "ab" for name in ("weight", "kept", "_extra_state")]
    assert list(names.raw_keys) == wanted
    assert list(names.raw_keys.values()) == list(model.state_dict())
    assert list(get_model_state_dict(model)) == wanted


def test_compiled_modules_at_any_depth() -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    wrapped = nn.Sequential(
        nn.Linear(2, 2), torch.compile(nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2))), backend="eager")
    )
    outer = torch.compile(wrapped, backend="eager")
    assert list(get_model_state_dict(outer)) == list(plain.state_dict())
    given = plain.state_dict()
    keys = set_model_state_dict(outer, given)
    assert (keys.missing_keys, keys.unexpected_keys) == ([], [])
    assert all(torch.equal(value, given[name]) for name, value in get_model_state_dict(outer).items())


def test_tied_parameters_have_one_name_and_aliases() -> None:
    model = nn.ModuleDict({"in": nn.Linear(2, 2, bias=False), "out": nn.Linear(2, 2, bias=False)})
    model["out"].weight = model["in"].weight
    names = name_model(model)
    assert names.aliases == {"out.weight": "in.weight"}
    assert list(names.fqn_of.values()) == ["in.weight"]
    assert list(get_model_state_dict(model)) == ["in.weight", "out.weight"]


def test_a_third_party_teaches_its_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Wrapper(nn.Linear(2, 2))
    assert list(get_model_state_dict(model)) == ["inside.weight", "inside.bias"]
    monkeypatch.setitem(sys.modules, "third_party_adapters", SimpleNamespace(Adapter=WrapperAdapter))

    class Plugin:
        @hookimpl
        def dcp_register_state_adapters(self) -> dict[str, str]:
            return {"wrapper": "third_party_adapters:Adapter"}

    plugins.register(Plugin(), name="wrapper-test")
    try:
        assert list(get_model_state_dict(model)) == ["weight", "bias"]
        set_model_state_dict(model, nn.Linear(2, 2).state_dict())
    finally:
        plugins.unregister("wrapper-test")


def test_one_name_for_two_tensors_is_refused() -> None:
    class Confusing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()
            self.weight = nn.Parameter(torch.ones(1))

        def _fqn_modifiers(self) -> dict[str, str]:
            return {"weight": "inner"}

    with pytest.raises(UnsupportedValueError, match="weight"):
        name_model(Confusing())


def test_parts_must_not_overlap() -> None:
    parts = [nn.ModuleDict({"0": nn.Linear(1, 1)}), nn.ModuleDict({"0": nn.Linear(1, 1)})]
    with pytest.raises(UnsupportedValueError, match="parts 0 and 1"):
        name_models(parts)
    assert len(name_models([parts[0], nn.ModuleDict({"1": nn.Linear(1, 1)})])) == 2


def test_keys_that_hooks_add_are_kept() -> None:
    model = torch.compile(nn.Sequential(nn.Linear(1, 1)), backend="eager")
    model._orig_mod[0]._register_state_dict_hook(
        lambda module, state, prefix, local: state.update({prefix + "a.b": torch.ones(1)})
    )
    assert list(get_model_state_dict(model)) == ["0.weight", "0.bias", "0.a.b"]
