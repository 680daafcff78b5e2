"""Errors and suggestions about templates that do not fit."""

import pickle

from dcp_core.planning.load_report import LoadMismatchError, LoadProblem, suggest


def test_every_problem_is_in_the_message() -> None:
    error = LoadMismatchError([LoadProblem(f"k{i}", "missing", f"'k{i}' is not in the checkpoint") for i in range(3)])
    assert all(f"'k{i}'" in str(error) for i in range(3))
    assert isinstance(error, RuntimeError)
    assert isinstance(error, ValueError)


def test_long_lists_are_cut_but_counted() -> None:
    error = LoadMismatchError([LoadProblem(f"k{i}", "missing", f"'k{i}' is gone") for i in range(80)])
    assert "80 problem(s)" in str(error)
    assert "and 30 more" in str(error)


def test_survives_pickling() -> None:
    error = LoadMismatchError([LoadProblem("a", "shape", "'a' differs")])
    assert pickle.loads(pickle.dumps(error)).problems == error.problems


def test_suggests_near_names_only() -> None:
    assert "'layers.0.weight'" in suggest("layer.0.weight", ["layers.0.weight", "bias"])
    assert suggest("zz", ["layers.0.weight"]) == ""
