"""Any mesh, placements, shape and dtype → any other: the same bits (property test on four ranks)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from integration_tests.oracle.resharding import Case, Layout, reshard

RANKS = 4
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16]
MESHES = [(1,), (2,), (3,), (4,), (2, 2), (1, 4), (4, 1), (2, 1), (1, 2), (2, 1, 2)]


@st.composite
def layouts(draw: st.DrawFn, ndim: int) -> Layout:
    mesh = draw(st.sampled_from(MESHES))
    dims = tuple(draw(st.one_of(st.none(), st.integers(0, ndim - 1)) if ndim else st.none()) for _ in mesh)
    return Layout(mesh, dims, draw(st.booleans()))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    # Small extents make uneven and empty shards frequent.
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    return Case(
        shape,
        draw(st.sampled_from(DTYPES)),
        draw(layouts(len(shape))),
        draw(layouts(len(shape))),
        draw(st.sampled_from(["torch", "raw"])),
    )


@pytest.mark.parametrize("examples", [4, pytest.param(16, marks=pytest.mark.slow)])
def test_bits_survive_any_resharding(ranks: Any, examples: int) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],  # each example is many seconds of ranks: do not shrink
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(batch=st.lists(cases(), min_size=12, max_size=12))
    def check(batch: list[Case]) -> None:
        _check(ranks, batch)

    check()


def _check(ranks: Any, batch: list[Case]) -> None:
    for outcomes in ranks.run(RANKS, reshard, batch):
        wrong = [(case, outcome) for case, outcome in zip(batch, outcomes, strict=True) if outcome != "ok"]
        assert not wrong


def test_the_cases_reach_what_matters() -> None:
    """The strategy makes empty and uneven shards, sub-meshes and strided placements, or the property says little."""
    seen: set[str] = set()

    @settings(max_examples=300, deadline=None, derandomize=True, database=None)
    @given(cases())
    def look(case: Case) -> None:
        for layout in (case.saved, case.loaded):
            sizes = [
                case.shape[dim] % extent
                for dim, extent in zip(layout.dims, layout.mesh, strict=True)
                if dim is not None
            ]
            seen.update(["uneven"] * any(sizes))
            seen.update(
                ["empty"]
                * any(
                    dim is not None and case.shape[dim] < extent
                    for dim, extent in zip(layout.dims, layout.mesh, strict=True)
                )
            )
            seen.update(["sub-mesh"] * (math.prod(layout.mesh) < RANKS))
            seen.update(
                ["strided"]
                * (
                    layout.strided
                    and len(layout.mesh) == 2
                    and layout.dims[0] is not None
                    and layout.dims[0] == layout.dims[1]
                )
            )

    look()
    assert seen == {"uneven", "empty", "sub-mesh", "strided"}
