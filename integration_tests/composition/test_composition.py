"""Selections of packages without the others; a few here, all of them in `nox -s composition`."""

from __future__ import annotations

import pytest

from integration_tests.composition.run import outcomes
from integration_tests.composition.selections import PACKAGES, closure, selections

FEW = [("dcp-manifest",), ("dcp-async", "dcp-bridge"), tuple(PACKAGES)]


def test_some_selections_work_without_the_others() -> None:
    assert [(names, error) for names, error in outcomes(FEW) if error is not None] == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_package_and_every_pair_works_without_the_others() -> None:
    asked = selections()
    assert len(asked) == len(PACKAGES) * (len(PACKAGES) + 1) // 2 + 1
    assert [(names, error) for names, error in outcomes(asked) if error is not None] == []


def test_an_install_brings_what_is_declared() -> None:
    assert closure(("dcp-fs",)) == ("dcp-base", "dcp-core", "dcp-fs", "dcp-io", "dcp-manifest", "dcp-ranks")
    assert closure(("dcp-manifest",)) == ("dcp-base", "dcp-manifest")
