from __future__ import annotations

import builtins
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

from dcp_core.objects.allowed_globals import allowed_globals, default_globals, default_table, may_never_be_allowed


class Mine:
    pass


def test_defaults_hold_nothing_that_runs_or_reaches_further() -> None:
    for path, value in default_globals().items():
        assert not may_never_be_allowed(path)
        assert value not in (eval, exec, getattr, setattr, open, compile, __import__, type, object, super)
        assert path.startswith(
            ("torch.", "builtins.", "collections.", "datetime.", "pathlib.", "numpy.", "_codecs.encode", "_io.", "io.")
        ) or path in (
            "decimal.Decimal",
            "fractions.Fraction",
            "uuid.UUID",
            "argparse.Namespace",
            "types.SimpleNamespace",
        )


def test_callers_add_their_own() -> None:
    allowed = allowed_globals([Mine, (Mine, "old.place.Mine")])
    assert allowed.by_name[f"{__name__}.Mine"] is Mine
    assert allowed.by_name["old.place.Mine"] is Mine
    assert id(Mine) in allowed.table.calls
    assert f"{__name__}.Mine" not in allowed_globals().by_name


def test_what_torch_was_told_counts() -> None:
    with torch.serialization.safe_globals([Mine]):
        assert f"{__name__}.Mine" in allowed_globals().by_name
    assert f"{__name__}.Mine" not in allowed_globals().by_name


@pytest.mark.parametrize(
    "dangerous",
    [
        *(os.system, os.popen, sys.exit, subprocess.run, pickle.loads),
        *(eval, exec, getattr, open, builtins.__import__),
        (eval, "nice.name"),
        (Mine, "os.system"),
        (os.system, "nice.name"),
    ],
)
def test_what_runs_anything_can_never_be_allowed(dangerous: object) -> None:
    with pytest.raises(ValueError, match="cannot be allowed"):
        allowed_globals([dangerous])


def test_values_are_not_callables() -> None:
    assert id(...) not in allowed_globals().table.calls
    assert id(torch.float32) not in allowed_globals().table.calls


@pytest.mark.parametrize("listed", [np.ndarray, np.dtype, torch.Tensor, set, (np.ndarray, "another.name")])
def test_what_is_allowed_by_default_stays_as_restricted_when_it_is_listed(listed: object) -> None:
    """Trainers list numpy's classes for torch; that must not lift the checks of their arguments."""
    with torch.serialization.safe_globals([listed]):
        for allowed in (allowed_globals(), allowed_globals([listed])):
            assert allowed.table.calls.get(id(np.ndarray)) is None
            assert allowed.table.calls.get(id(torch.Tensor)) is None
            assert allowed.table.calls[id(np.dtype)] is default_table().calls[id(np.dtype)]
            assert allowed.table.calls[id(set)] is default_table().calls[id(set)]
