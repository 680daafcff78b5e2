"""Plans of many ranks that share a form: rebuilt exactly, and planned as if each rank had sent its own."""

from __future__ import annotations

import itertools
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_core.planning.global_plan import plan_columns
from dcp_core.planning.plan_exchange import compared_values
from dcp_core.planning.plan_forms import Form, brief_of
from dcp_core.planning.replicas import agreed_aliases, divergent_keys
from dcp_core.records.metadata import ChunkStorageMetadata, TensorProperties
from dcp_core.records.protocols import SavePlan
from dcp_core.tables.metadata_columns import records_of
from dcp_core.tables.plan_columns import ColumnBuilder, columns_of

WORLD = 16
Boxes = list[tuple[tuple[int, ...], tuple[int, ...]]]


def rows(rank: int) -> tuple[tuple[int, ...], Boxes]:
    return (WORLD * 3, 5), [((rank * 3, 0), (3, 5))]


def grid(rank: int) -> tuple[tuple[int, ...], Boxes]:
    return (WORLD // 4 * 2, 4 * 3), [((rank // 4 * 2, rank % 4 * 3), (2, 3))]


def shuffled(rank: int) -> tuple[tuple[int, ...], Boxes]:
    return (WORLD * 3, 5), [((rank * 7 % WORLD * 3, 0), (3, 5))]


def uneven(rank: int) -> tuple[tuple[int, ...], Boxes]:
    size = WORLD * 3 - 7
    return (size,), [((rank * 3,), (min(3, size - rank * 3),))] if rank * 3 < size else []


def two_chunks(rank: int) -> tuple[tuple[int, ...], Boxes]:
    return (WORLD * 4,), [((rank * 2,), (2,)), ((rank * 2 + 2 * WORLD,), (2,))]


def halves(rank: int) -> tuple[tuple[int, ...], Boxes]:
    return (WORLD // 2 * 3,), [((rank % (WORLD // 2) * 3,), (3,))]


def pipeline(rank: int) -> tuple[tuple[int, ...], Boxes]:
    return (WORLD // 2 * 3,), [((rank * 3,), (3,))] if rank < WORLD // 2 else []


def whole(rank: int) -> tuple[tuple[int, ...], Boxes]:
    return (7, 2), [((0, 0), (7, 2))]


def large(rank: int) -> tuple[tuple[int, ...], Boxes]:
    return (4096, 1024), [((0, 0), (4096, 1024))]


def scalar(rank: int) -> tuple[tuple[int, ...], Boxes]:
    return (), [((), ())]


def hole(rank: int) -> tuple[tuple[int, ...], Boxes]:
    return (WORLD * 2,), [((rank * 2,), (2,))] if rank != 5 else []


def overlap(rank: int) -> tuple[tuple[int, ...], Boxes]:
    return (WORLD * 2,), [((min(rank, 14) * 2,), (2,))]


def beyond(rank: int) -> tuple[tuple[int, ...], Boxes]:
    return (WORLD * 2,), [(((rank + 1) * 2,), (2,))]


GOOD = [rows, grid, shuffled, uneven, two_chunks, halves, pipeline, whole, large, scalar]
BAD = [hole, overlap, beyond]


def plan_of(rank: int, layouts, *, own_names: bool = False, tie: bool = False, digest=lambda rank: 7) -> SavePlan:
    builder = ColumnBuilder()
    names = [f"t{number}.{layout.__name__}" for number, layout in enumerate(layouts)]
    for number, (name, layout) in enumerate(zip(names, layouts, strict=True)):
        shape, boxes = layout(rank)
        chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
        dtype = (torch.float32, torch.bfloat16)[number % 2]
        if chunks:
            builder.add(name, TensorProperties(dtype), shape, chunks, whole=layout in (whole, large, scalar))
    if own_names:
        builder.add_plain(f"own.{rank}", torch.zeros(3))
    columns = builder.columns(["step", f"rng.{rank // 8}"], [64, 100 + rank // 8])
    return SavePlan(
        columns.items(),
        planner_data={name: (name,) for name in names},
        aliases={names[-1]: names[0]} if tie else None,
        digests={"step": digest(rank)},
        splittable=True,
    )


def rebuilt(plans: list[SavePlan]) -> tuple[list[SavePlan], int]:
    """The plans as the coordinator gets them, and the number of their forms."""
    briefs = [brief_of(plan, known=True) for plan in plans]
    forms: dict[bytes, Form] = {}
    for brief, plan in zip(briefs, plans, strict=True):
        forms.setdefault(brief.form, Form(pickle.loads(pickle.dumps(plan))))
    sent = pickle.loads(pickle.dumps(briefs))
    return [forms[brief.form].plan(brief) for brief in sent], len(forms)


def arrays_of(index) -> dict[str, object]:
    names = ("tensor_names", "tensor_dtype", "tensor_flags", "tensor_ndim", "tensor_shape", "tensor_chunks")
    more = ("chunk_offsets", "chunk_sizes", "object_names", "alias_names", "alias_targets", "dtypes")
    values = {name: getattr(index, name) for name in (*names, *more)}
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}


def planned(plans: list[SavePlan]):
    found = plan_columns(
        plans,
        agreed_aliases(plans),
        complete=True,
        to_lowest_rank=False,
        pinned_to_lowest=divergent_keys(plans),
    )
    if found is None:
        return None
    finals, metadata = found
    chosen = [columns_of(plan.items) for plan in finals]
    return arrays_of(records_of(metadata).index), [
        (arrays_of(one.table), one.hints.tolist(), one.whole.tolist(), one.object_bytes.tolist(), one.chosen.parts)
        for one in chosen
    ]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([*GOOD, *BAD]), min_size=1, max_size=6),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_plans_of_one_form_are_planned_as_if_each_were_sent(layouts, own_names, tie, differ):
    def digest(rank: int) -> int:
        return 7 + (differ and rank > 9)

    plans = [plan_of(rank, layouts, own_names=own_names, tie=tie, digest=digest) for rank in range(WORLD)]
    shared, _ = rebuilt(plans)
    for one, other in zip(plans, shared, strict=True):
        assert arrays_of(columns_of(one.items).table) == arrays_of(columns_of(other.items).table)
        assert replace(one, items=[]) == replace(other, items=[])
    assert compared_values(shared) == compared_values(plans)
    assert divergent_keys(shared) == divergent_keys(plans)
    assert planned(shared) == planned(plans)


@pytest.mark.parametrize(
    ("layouts", "forms"),
    [
        ([rows, grid, rows, shuffled], 2),
        ([rows, uneven, grid], 4),
        ([rows, halves, whole, scalar, two_chunks], 2),
        ([pipeline, rows], 2),
    ],
)
def test_ranks_have_few_forms(layouts, forms):
    """The objects of ranks 0 to 7 are not those of ranks 8 to 15: no plans have one form."""
    assert rebuilt([replace(plan_of(rank, layouts), digests=None) for rank in range(WORLD)])[1] == forms


def test_a_brief_is_short():
    sizes = {len(pickle.dumps(brief_of(plan_of(rank, [rows, grid] * 50), known=True))) for rank in range(WORLD)}
    assert max(sizes) < 300


def test_plans_that_differ_have_different_forms():
    plan = plan_of(3, [rows, grid, whole])
    columns = columns_of(plan.items)

    def changed(**columns_changed):
        table = replace(columns.table, **columns_changed)
        return replace(plan, items=type(columns)(table, columns.whole, columns.object_bytes).items())

    flags = columns.table.tensor_flags.copy()
    flags[1] = 1
    others = [
        changed(tensor_flags=flags),
        changed(tensor_names=["other", *columns.table.tensor_names[1:]]),
        replace(plan, digests={"step": 8}),
        replace(plan, splittable=False),
        replace(plan, planner_data=None),
        replace(plan, storage_data="prefix"),
        replace(plan, items=type(columns)(columns.table, columns.whole, columns.object_bytes + 1).items()),
        replace(plan, items=type(columns)(columns.table, 1 - columns.whole, columns.object_bytes).items()),
    ]
    forms = [brief_of(one, known=True).form for one in (plan, *others)]
    assert all(one != other for one, other in itertools.combinations(forms, 2))
    assert brief_of(plan_of(4, [rows, grid, whole]), known=True).form == forms[0]


def test_a_plan_of_another_class_is_sent_whole():
    class Other(SavePlan):
        pass

    assert brief_of(Other(plan_of(0, [rows]).items), known=False) is None
    assert brief_of(replace(plan_of(0, [rows]), planner_data=lambda: None), known=False) is None
