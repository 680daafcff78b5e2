"""The proof finds each part that a language model's loop leaves out, and nothing where nothing is left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration_tests.resume.language import OMISSIONS, Language
from integration_tests.resume.proofs import prove

# The loop of `test_vision` plants each omission in the gating tests; here two ranks without and with one do.
_GATING = (None, "one-rank-rng")


@pytest.mark.parametrize(
    "omit",
    [omit if omit in _GATING else pytest.param(omit, marks=pytest.mark.slow) for omit in (None, *OMISSIONS)],
)
def test_each_omission_is_named(tmp_path: Path, omit: str | None) -> None:
    """The kill is in the second pass over the documents, between two steps of the optimizer."""
    sizes = (2,) if omit in (None, "one-rank-rng") else (1,)
    kill_at = 9 if sizes == (2,) else 17
    report = prove(Language, tmp_path, sizes, steps=kill_at + 4, kill_at=kill_at, omit=omit)
    assert report.omissions == ([] if omit is None else [omit]), str(report)
    assert report.ok is (omit is None)
