"""Who writes what several ranks hold."""

import itertools

import pytest
import torch

from dcp_core.errors import PlanError
from dcp_core.planning.replicas import (
    DivergentReplicaWarning,
    agreed_aliases,
    dedup_save_plans,
    divergent_keys,
    report_divergence,
)
from dcp_core.records.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from dcp_core.records.protocols import SavePlan, TensorWriteData, WriteItem, WriteItemType


def item(fqn: str, sizes: tuple[int, ...] = (4,), *, dtype: torch.dtype = torch.uint8, offset: int = 0) -> WriteItem:
    offsets = torch.Size((offset, *(0,) * (len(sizes) - 1)))
    data = TensorWriteData(
        ChunkStorageMetadata(offsets, torch.Size(sizes)),
        TensorProperties(dtype),
        torch.Size((offset + sizes[0], *sizes[1:])),
    )
    return WriteItem(MetadataIndex(fqn, offsets), WriteItemType.TENSOR, None, data)


def names(plans: list[SavePlan]) -> list[list[str]]:
    return [[each.index.fqn for each in plan.items] for plan in plans]


def loads(plans: list[SavePlan]) -> list[int]:
    return [sum(each.chunk_bytes() for each in plan.items) for plan in plans]


def test_every_item_is_written_once_and_loads_are_level() -> None:
    values = [item("big", (100,)), *(item(f"small{i}", (10,)) for i in range(10))]
    plans = dedup_save_plans([SavePlan(list(values)) for _ in range(2)])
    assert sorted(itertools.chain(*names(plans))) == sorted(value.index.fqn for value in values)
    assert loads(plans) == [100, 100]


def test_weighs_a_shard_by_its_own_bytes() -> None:
    shard = WriteItem(
        MetadataIndex("sharded", (0,)),
        WriteItemType.SHARD,
        None,
        TensorWriteData(
            ChunkStorageMetadata(torch.Size((0,)), torch.Size((10,))),
            TensorProperties(torch.uint8),
            torch.Size((10_000,)),
        ),
    )
    replicas = [item(f"r{i}", (10,)) for i in range(3)]
    assert loads(dedup_save_plans([SavePlan([shard, *replicas]), SavePlan(list(replicas))])) == [20, 20]


def test_lowest_rank_on_request_and_for_pinned_keys() -> None:
    plans = [SavePlan([item("a"), item("b")]) for _ in range(3)]
    assert names(dedup_save_plans(plans, save_to_lowest_rank=True)) == [["a", "b"], [], []]
    assert names(dedup_save_plans(plans, pinned_to_lowest=["a", "b"])) == [["a", "b"], [], []]


def test_same_answer_every_time() -> None:
    plans = [SavePlan([item(f"t{i}", (i + 1,)) for i in range(50)]) for _ in range(4)]
    assert names(dedup_save_plans(plans)) == names(dedup_save_plans(plans))


def test_a_box_that_one_rank_holds_twice_is_written_once() -> None:
    assert names(dedup_save_plans([SavePlan([item("a"), item("a")])])) == [["a"]]


@pytest.mark.parametrize("other", [item("a", (5,)), item("a", (4,), dtype=torch.int8)], ids=["shape", "dtype"])
def test_ranks_that_disagree_are_named(other: WriteItem) -> None:
    with pytest.raises(PlanError, match=r"'a' differs between ranks.*rank 0.*rank 1"):
        dedup_save_plans([SavePlan([item("a")]), SavePlan([other])])


@pytest.mark.parametrize("offset", [(0,), None])
def test_tensor_here_object_there(offset: tuple[int, ...] | None) -> None:
    thing = WriteItem(MetadataIndex("a", offset), WriteItemType.BYTE_IO)
    with pytest.raises(PlanError, match="ranks 0, 1"):
        dedup_save_plans([SavePlan([item("a")]), SavePlan([thing])])


@pytest.mark.parametrize(
    ("aliases", "held", "agreed"),
    [
        ([{"b": "a"}, {"b": "a"}], ["ab", "ab"], {"b": "a"}),
        ([{"b": "a"}, None], ["ab", "ab"], {}),
        ([{"b": "a"}, None], ["ab", "c"], {"b": "a"}),
        ([{"b": "a"}, None], ["ab", "b"], {}),
        ([{"b": "a"}, None], ["ab", "a"], {}),
        ([{"b": "a"}, {"b": "c"}], ["ab", "bc"], {}),
        ([None, None], ["ab", "ab"], {}),
    ],
)
def test_ties_count_only_where_all_ranks_agree(
    aliases: list[dict[str, str] | None], held: list[str], agreed: dict[str, str]
) -> None:
    plans = [SavePlan([item(name) for name in keys], aliases=tied) for tied, keys in zip(aliases, held, strict=True)]
    assert agreed_aliases(plans) == agreed


def test_divergent_replicas_are_found_and_reported() -> None:
    plans = [
        SavePlan([], digests={"a": 1, "b": 5}),
        SavePlan([], digests={"a": 2, "b": 5}),
        SavePlan([], digests={"a": 1}),
    ]
    divergent = divergent_keys(plans)
    assert divergent == {"a": [1]}
    with pytest.warns(DivergentReplicaWarning, match=r"'a' on ranks \[1\]"):
        report_divergence(divergent, "check")
    with pytest.raises(PlanError, match="'a'"):
        report_divergence(divergent, "raise")
    report_divergence(divergent, "ignore")
