"""Warnings at a save about objects that a load would refuse, and the remedy that they name."""

from __future__ import annotations

import collections
import functools
import http.cookies
import operator
import re
import signal
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from dcp_core.errors import (
    CorruptCheckpointError,
    UnsupportedValueError,
)
from dcp_core.objects import allowed_globals
from dcp_core.objects.object_bytes import UnloadableObjectWarning, dump_object, load_object, report_unloadable
from dcp_core.planning.save_planner import DefaultSavePlanner


class Unlisted:
    """A class of a trainer."""

    class Inner:
        """One within it."""


class Mapping2(dict[str, int]):
    """A container of a trainer."""


def remedy_of(message: str) -> tuple[str, str]:
    """The imports and the list that a warning tells to use."""
    listed = re.search(r"allow_globals=(\[.*?\])\) after", message)
    assert listed is not None
    return "\n".join(re.findall(r"`(from .*?)`", message)), listed[1]


@pytest.mark.parametrize(
    "value",
    [
        [http.cookies.SimpleCookie("a=1"), collections.UserList([1])],
        functools.partial(int, "5"),
        [np.random.default_rng(3)],
        operator.attrgetter("a"),
        signal.SIGINT,
        http.cookies.SimpleCookie,
    ],
)
def test_the_remedy_that_a_warning_gives_works_as_it_stands(value: object) -> None:
    data = dump_object(value, key="k")
    with pytest.warns(UnloadableObjectWarning, match="'k' would not load back") as caught:
        report_unloadable(data, key="k")
    imports, listed = remedy_of(str(caught[0].message))
    names: dict[str, Any] = {}
    exec(imports, names)
    allowed = eval(listed, names)
    with torch.serialization.safe_globals(allowed):
        report_unloadable(data, key="k", strict=True)
    assert repr(type(load_object(data, key="k", allow_globals=allowed))) == repr(type(value))


def test_names_that_are_alike_are_told_apart() -> None:
    code = allowed_globals.as_expression(["a.b.Config", "c.d.Config", f"{__name__}.Unlisted.Inner"])
    assert (
        code[0]
        == f"`from a.b import Config` and `from c.d import Config as d_Config` and `from {__name__} import Unlisted`"
    )
    assert code[1] == "Config, d_Config, Unlisted.Inner"


def test_what_would_be_refused_for_its_contents_is_reported_too(recwarn: pytest.WarningsRecorder) -> None:
    """Every name is allowed, and yet a load refuses it."""
    value = np.zeros(2, [("a", "O")])
    with pytest.raises(UnsupportedValueError, match=r"'k' would not load back.*not allowed.*Store plain data"):
        report_unloadable(dump_object(value, key="k"), key="k", strict=True)
    with pytest.raises(CorruptCheckpointError, match="not allowed"):
        load_object(dump_object(value, key="k"), key="k")
    assert not recwarn.list


def test_a_class_is_warned_of_once() -> None:
    reported: set[str] = set()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for key in ("a", "b", "c"):
            report_unloadable(dump_object({"x": Unlisted()}, key=key), key=key, reported=reported)
        report_unloadable(dump_object(Mapping2(a=1), key="d"), key="d", reported=reported)
    assert [str(warning.message)[:3] for warning in caught] == ["'a'", "'d'"]


def test_a_save_warns_of_a_class_once() -> None:
    planner = DefaultSavePlanner()
    for state in ({"a": Unlisted(), "b": Unlisted()}, {"a": Unlisted()}):
        planner.set_up_planner(state)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            planner.create_local_plan()
        assert len(caught) == ("b" in state)


def test_a_class_within_a_class_is_named() -> None:
    with pytest.warns(UnloadableObjectWarning, match=r"builtins\.getattr \(.*within a class\) can run any code"):
        report_unloadable(dump_object(Unlisted.Inner(), key="k"), key="k")
