"""The global plan over columns: what `global_plan` does with records, for plans whose items nobody has looked at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from dcp_core.columns import metadata_from_index, paths_of
from dcp_core.index_records import StateRecords
from dcp_core.lazy import LazyDict
from dcp_core.metadata import Metadata
from dcp_core.plan import SavePlan
from dcp_core.plan_columns import PlanColumns, columns_of, written_of
from dcp_core.protocols import WriteResult
from dcp_manifest.columns import CheckpointIndex
from dcp_manifest.merge import take_tensors
from dcp_manifest.stored_items import take_items

__all__ = ["index_with_items", "plan_alone"]


def plan_alone(all_plans: list[SavePlan], *, complete: bool) -> tuple[list[SavePlan], Metadata] | None:
    """The plan and metadata of a rank that saves by itself; None if columns do not tell, or something is wrong.

    Args:
        all_plans: Of all ranks.
        complete: Whether chunks must make up whole tensors.
    """
    columns = columns_of(all_plans[0].items) if len(all_plans) == 1 else None
    if columns is None or not _is_certain(columns, complete=complete):
        return None
    (plan,) = all_plans
    columns, aliases = _without_aliases(columns, plan.aliases or {})
    index = columns.index
    rows = dict(zip(index.tensor_names, range(len(index.tensor_names)), strict=True)) if aliases else {}
    targets = np.array([rows[target] for target in aliases.values()], np.uint32)
    metadata = metadata_from_index(replace(index, alias_names=list(aliases), alias_targets=targets))
    hinted = PlanColumns(index, columns.whole, columns.object_bytes, hinted=True)
    return [replace(plan, items=hinted.items())], metadata


def index_with_items(metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> CheckpointIndex | None:
    """The index of a save whose metadata and results are still columns; None if they are not, or of several ranks.

    Args:
        metadata: As `plan_alone` made it; a planner may have given it other `planner_data`.
        results: Of each rank.

    Raises:
        UnsupportedValueError: `planner_data` is not of a form that a manifest can hold.
    """
    written = written_of(results[0]) if len(results) == 1 else None
    entries = metadata.state_dict_metadata
    if written is None or not isinstance(entries, LazyDict) or entries.touched:
        return None
    source = entries.source
    if not isinstance(source, StateRecords) or source.index.tensor_names is not written.planned.index.tensor_names:
        return None
    stored, chunks = written.stored, len(source.index.tensor_chunks)
    return replace(
        source.index,
        files=stored.files,
        chains=stored.chains,
        chunk_items=take_items([stored.columns], np.arange(chunks)),
        object_items=take_items([stored.columns], np.arange(chunks, len(stored))),
        paths=paths_of(metadata.planner_data),
    )


def _is_certain(columns: PlanColumns, *, complete: bool) -> bool:
    """Whether each tensor is one chunk within its bounds, and all of it where it must be complete."""
    index = columns.index
    if not (index.tensor_chunks == 1).all():
        return False
    # With one chunk each, boxes and shapes lie side by side.
    offsets, sizes, shape = index.chunk_offsets, index.chunk_sizes, index.tensor_shape
    if complete:
        return not offsets.any() and np.array_equal(sizes, shape)
    return bool(((offsets >= 0) & (sizes >= 0) & (offsets + sizes <= shape)).all())


def _without_aliases(columns: PlanColumns, aliases: dict[str, str]) -> tuple[PlanColumns, dict[str, str]]:
    names = columns.index.tensor_names
    aliases = {alias: target for alias, target in aliases.items() if target not in aliases}
    if not aliases:
        return columns, {}
    kept: npt.NDArray[np.int64] = np.array([row for row, name in enumerate(names) if name not in aliases], np.int64)
    index = take_tensors(columns.index, kept)
    index.tensor_names = [names[row] for row in kept.tolist()]
    return PlanColumns(index, columns.whole[kept], columns.object_bytes), aliases
