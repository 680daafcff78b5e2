from __future__ import annotations

import inspect
import pickle

import pytest

from dcp_core import errors


def test_every_error_is_a_dcp_error_and_a_builtin() -> None:
    for name in errors.__all__:
        cls = getattr(errors, name)
        assert issubclass(cls, errors.DcpError)
        assert inspect.getdoc(cls)
    builtin = {
        errors.CheckpointException: RuntimeError,
        errors.CoordinatorLostError: ConnectionError,
        errors.UnsupportedValueError: ValueError,
        errors.PlanError: ValueError,
        errors.PluginLoadError: ImportError,
        errors.PluginNotFoundError: RuntimeError,
        errors.PluginNotFoundError: LookupError,
        errors.PlanError: ValueError,
        errors.UnsupportedValueError: TypeError,
    }
    for cls, base in builtin.items():
        assert issubclass(cls, base)


def test_checkpoint_exception_names_step_ranks_and_tracebacks() -> None:
    error = errors.CheckpointException(
        "step 'write' failed", {3: (None, "text of 3"), 1: (OSError("full"), "text of 1")}
    )
    assert list(error.failures) == [1, 3]
    assert str(error).startswith("step 'write' failed (failed on ranks 1, 3)")
    assert "text of 1" in str(error)
    assert "text of 3" in str(error)
    assert isinstance(error, Exception)


def test_checkpoint_exception_without_failures_is_its_message() -> None:
    assert str(errors.CheckpointException("nothing", {})) == "nothing"


def test_checkpoint_exception_pickles() -> None:
    error = errors.CheckpointException("write", {1: (OSError("full"), "text")})
    twin = pickle.loads(pickle.dumps(error))
    assert str(twin) == str(error)
    assert isinstance(twin.failures[1][0], OSError)


def test_can_be_caught_as_exception() -> None:
    with pytest.raises(Exception, match="write"):
        raise errors.CheckpointException("write", {})
