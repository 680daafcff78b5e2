"""Plans of many ranks that are planned once per way of cutting: equal to the plan of each chunk by itself."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_core.planning import even_cuts
from dcp_core.planning.even_cuts import plan_all
from dcp_core.planning.global_plan import plan_columns
from dcp_core.planning.plan_forms import Form, brief_of
from dcp_core.planning.replicas import agreed_aliases, divergent_keys
from dcp_core.records.lazy import LazyList
from dcp_core.records.metadata import ChunkStorageMetadata, TensorProperties
from dcp_core.records.protocols import SavePlan
from dcp_core.tables.metadata_columns import planned_rows, records_of
from dcp_core.tables.plan_columns import ColumnBuilder, PlannedRows, columns_of

DTYPES = (torch.float32, torch.bfloat16, torch.int64)
MESHES = ((16,), (2, 8), (4, 4), (8, 2), (2, 2, 4), (24,), (3, 8), (2, 3, 4))


@st.composite
def jobs(draw):
    """A mesh, and per tensor: shape, placements, dtype, and how often it is repeated in its first dimension.

    A placement is, per dimension of the mesh, the dimension of the tensor that it cuts, or None.
    """
    mesh = draw(st.sampled_from(MESHES))
    tensors = []
    for _ in range(draw(st.integers(1, 6))):
        ndim = draw(st.integers(0, 3))
        cut = draw(st.lists(st.none() | st.integers(0, max(0, ndim - 1)), min_size=len(mesh), max_size=len(mesh)))
        if ndim == 0:
            cut = [None] * len(mesh)
        shape = []
        for dim in range(ndim):
            parts = math.prod(size for size, by in zip(mesh, cut, strict=True) if by == dim)
            even = parts * draw(st.sampled_from((0, 1, 2, 3, 6)))
            shape.append(draw(st.sampled_from((even, even, even, even + 1, even + parts // 2, 5))))
        if ndim and draw(st.integers(0, 9)) == 0:
            shape[-1] *= 1 << 20  # large enough to be written in parts
        tensors.append((tuple(shape), tuple(cut), draw(st.sampled_from(DTYPES)), draw(st.sampled_from((1, 1, 2)))))
    return mesh, tensors


def box_of(shape, cut, mesh, rank):
    """The DTensor's shard: each mesh dimension cuts what the ones before have left, in parts of the rounded up size."""
    begin, end = [0] * len(shape), list(shape)
    for size, by, at in zip(mesh, cut, np.unravel_index(rank, mesh), strict=True):
        if by is not None:
            step = -(-(end[by] - begin[by]) // size)
            begin[by], end[by] = (min(end[by], begin[by] + step * number) for number in (int(at), int(at) + 1))
    return tuple(begin), tuple(high - low for low, high in zip(begin, end, strict=True))


def plan_of(rank, mesh, tensors, *, tie=False, differ=(), strange=None, unsplittable=(), objects=True) -> SavePlan:
    builder = ColumnBuilder()
    for number, (shape, cut, dtype, times) in enumerate(tensors):
        offsets, sizes = box_of(shape, cut, mesh, rank)
        if strange is not None:
            offsets = strange(number, rank, offsets)
        if any(begin >= end for begin, end in zip(offsets, shape, strict=True) if end):
            continue  # nothing of this tensor is left for the rank
        shapes = [(shape[0] * times, *shape[1:])] if shape else [()]
        boxes = [(offsets[0] + shape[0] * at, *offsets[1:]) for at in range(times)] if shape and shape[0] else [offsets]
        chunks = [ChunkStorageMetadata(torch.Size(begin), torch.Size(sizes)) for begin in boxes]
        properties = TensorProperties(dtype, requires_grad=rank % 2 == 0 and number == 0)
        builder.add(f"t{number}", properties, shapes[0], chunks, whole=sizes == shapes[0])
    columns = builder.columns(["step", "rng"] if objects else [], [64, 1000] if objects else [])
    last = f"t{len(tensors) - 1}"
    return SavePlan(
        columns.items(),
        planner_data={"step": ("step",)},
        aliases={last: "t0"} if tie and len(tensors) > 1 else None,
        digests={"step": 7 + (rank in differ), "t0": 8 + (rank in differ)},
        splittable=rank not in unsplittable,
    )


def rebuilt(plans: list[SavePlan]) -> list[SavePlan]:
    """The plans as the coordinator, rank 0, gets them."""
    briefs = [brief_of(plan, known=True) for plan in plans]
    forms: dict[bytes, Form] = {}
    for brief, plan in zip(briefs, plans, strict=True):
        if brief.form not in forms:
            forms[brief.form] = Form(pickle.loads(pickle.dumps(plan)))
    sent = [forms[brief.form].plan(brief) for brief in pickle.loads(pickle.dumps(briefs))]
    return [plans[0], *sent[1:]]


def facts_of(index) -> dict[str, object]:
    names = ("tensor_names", "tensor_dtype", "tensor_flags", "tensor_ndim", "tensor_owner", "tensor_shape", "dtypes")
    more = ("tensor_chunks", "chunk_offsets", "chunk_sizes", "object_names", "object_owner", "alias_names")
    values = {name: getattr(index, name) for name in (*names, *more, "alias_targets")}
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}


def rows_of(items, records):
    return planned_rows(items.source if isinstance(items.source, PlannedRows) else columns_of(items), records)


def planned(plan, plans, **options):
    """Everything that a save uses of the global plan."""
    aliases = agreed_aliases(plans)
    given = {"complete": True, "to_lowest_rank": False, "pinned_to_lowest": divergent_keys(plans), **options}
    found = plan(plans, aliases, **given)
    if found is None:
        return None
    finals, metadata = found
    records = records_of(metadata)
    ranks = []
    for before, after in zip(plans, finals, strict=True):
        one, rows = columns_of(after.items), rows_of(after.items, records)
        # Another save of the same plans knows only the rows.
        again = columns_of(LazyList(replace(rows, chosen=None, chosen_from=None)))
        chosen = pickle.loads(pickle.dumps(one.chosen))
        ranks.append(
            {
                "own": facts_of(one.table),
                "numbers": [each.tolist() for each in (one.hints, one.whole, one.object_bytes)],
                "rows": [each.tolist() for each in (rows.chunks, rows.objects, rows.whole, rows.object_bytes)],
                "again": [list(again), again.hints.tolist()],
                "chosen": [chosen.chunks.tolist(), chosen.objects.tolist(), chosen.hints.tolist(), chosen.parts],
                "sent": (one.chosen_from() is before.items.source, replace(after, items=[])),
                "records": list(one),
            }
        )
    return facts_of(records.index), ranks


@pytest.fixture(autouse=True)
def few_ranks(monkeypatch):
    """Plan by classes however many forms there are."""
    monkeypatch.setattr(even_cuts, "_RANKS_PER_FORM", 1)


@settings(max_examples=60, deadline=None)
@given(jobs(), st.booleans(), st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_equals_the_plan_of_each_chunk(job, tie, differ, to_lowest, unsplittable, objects):
    mesh, tensors = job
    plans = [
        plan_of(rank, mesh, tensors, tie=tie, differ=(3, 9) * differ, unsplittable=(4,) * unsplittable, objects=objects)
        for rank in range(math.prod(mesh))
    ]
    for complete in (True, False):
        options = {"to_lowest_rank": to_lowest, "complete": complete}
        assert planned(plan_all, rebuilt(plans), **options) == planned(plan_columns, plans, **options)


def moved(number, rank, offsets):
    return tuple(offset + (rank == 5) for offset in offsets)


def repeated(number, rank, offsets):
    return offsets if rank != 5 else (0,) * len(offsets)


def shuffled(number, rank, offsets):
    return tuple(offset * 3 for offset in offsets)


@settings(max_examples=60, deadline=None)
@given(jobs(), st.sampled_from([moved, repeated, shuffled]))
def test_refuses_what_the_plan_of_each_chunk_refuses(job, strange):
    mesh, tensors = job
    plans = [plan_of(rank, mesh, tensors, strange=strange) for rank in range(math.prod(mesh))]
    assert planned(plan_all, rebuilt(plans)) == planned(plan_columns, plans)


ROWS = ((16 * 4, 6), (0,), torch.float32, 1)
GRID = [
    ((8 * 3, 2 * 5), (0, 1), torch.bfloat16, 1),
    ((8 * 6, 2 * 5), (0, 1), torch.float32, 1),
    ((7,), (None, None), DTYPES[0], 1),
]


@pytest.mark.parametrize(
    ("mesh", "tensors"),
    [
        ((16,), [ROWS] * 3),
        ((16,), [ROWS, ((16 * 4 + 3, 6), (0,), torch.float32, 1), ((1 << 22,), (None,), torch.float32, 1)]),
        ((8, 2), GRID),
        ((16,), [((9,), (0,), torch.float32, 1), ROWS]),
        ((16,), [((16, 6), (0,), torch.float32, 2), ((48, 2), (0,), torch.float32, 2), ROWS]),
        ((16,), [((8, 0), (0,), torch.float32, 1), ((7,), (None,), torch.float32, 1)]),
    ],
    ids=["rows", "uneven rows and a replica in parts", "grid", "fewer rows than ranks", "two chunks", "empty chunks"],
)
def test_even_plans_do_not_visit_each_chunk(monkeypatch, mesh, tensors):
    plans = [plan_of(rank, mesh, tensors) for rank in range(16)]
    expected = planned(plan_columns, plans)
    monkeypatch.setattr(even_cuts, "plan_columns", lambda *_, **__: pytest.fail("planned each chunk"))
    assert planned(plan_all, rebuilt(plans)) == expected


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("count", [255, 256, 300])
def test_a_plan_may_have_more_tensors_than_dimensions(monkeypatch, count, tie):
    """Scalars have no offsets, so their number says nothing about the number of chunks."""
    plans = [plan_of(rank, (16,), [((), (None,), torch.float32, 1)] * count + [ROWS], tie=tie) for rank in range(16)]
    expected = planned(plan_columns, plans)
    monkeypatch.setattr(even_cuts, "plan_columns", lambda *_, **__: pytest.fail("planned each chunk"))
    assert planned(plan_all, rebuilt(plans)) == expected


def test_final_plans_of_equal_forms_are_rows():
    plans = rebuilt([plan_of(rank, (16,), [ROWS] * 3) for rank in range(16)])
    finals, _ = plan_all(plans, {}, complete=True, to_lowest_rank=False, pinned_to_lowest=())
    assert [type(plan.items.source) is PlannedRows for plan in finals] == [False] + [True] * 15
    assert all("table" not in vars(plan.items.source) for plan in plans[1:])  # offsets were not needed


def test_tensors_of_which_two_ranks_swap_rows_are_not_cut_alike():
    def plan(rank: int) -> SavePlan:
        builder = ColumnBuilder()
        for name, row in (("a", rank), ("b", {4: 5, 5: 4}.get(rank, rank))):
            chunk = ChunkStorageMetadata(torch.Size((row * 2,)), torch.Size((2,)))
            builder.add(name, TensorProperties(torch.float32), (32,), [chunk], whole=False)
        return SavePlan(builder.columns([]).items(), splittable=True)

    plans = [plan(rank) for rank in range(16)]
    assert planned(plan_all, rebuilt(plans)) == planned(plan_columns, plans)


def test_plans_with_forms_of_their_own_are_planned_singly(monkeypatch):
    monkeypatch.setattr(even_cuts, "_RANKS_PER_FORM", 16)
    plans = [plan_of(rank, (16,), [ROWS]) for rank in range(16)]
    monkeypatch.setattr(even_cuts, "_Group", None)  # not used
    assert planned(plan_all, plans) == planned(plan_columns, plans)
