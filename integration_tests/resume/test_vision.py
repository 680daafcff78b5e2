"""The proof finds each part that a vision loop leaves out of its checkpoints, and nothing where nothing is left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration_tests.resume.proofs import prove
from integration_tests.resume.vision import OMISSIONS, Vision


@pytest.mark.parametrize("omit", [None, *OMISSIONS])
def test_each_omission_is_named(tmp_path: Path, omit: str | None) -> None:
    """The kill is in the second epoch, between two steps of the optimizer."""
    one_rank = omit != "one-rank-rng"
    report = prove(
        *(Vision, tmp_path, (1,) if one_rank else (2,)),
        steps=18 if one_rank else 12,
        kill_at=15 if one_rank else 9,
        omit=omit,
        workers=1 if omit == "worker-seeds" else 0,
    )
    assert report.omissions == ([] if omit is None else [omit]), str(report)
    assert report.ok is (omit is None)
