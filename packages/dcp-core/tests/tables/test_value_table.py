"""Items of local values, and ties between them."""

from dataclasses import replace

import pytest
import torch

from dcp_core.errors import PlanError
from dcp_core.records.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from dcp_core.records.protocols import TensorWriteData, WriteItem, WriteItemType
from dcp_core.shards.shards import local_tensor
from dcp_core.tables.plan_columns import columns_of
from dcp_core.tables.value_table import find_ties, local_values


def ties(**values: object) -> dict[str, str]:
    return find_ties(local_values(values).held.items())


class OwnItems:
    """Decides on its items itself, as objects with stock's hooks do."""

    def __init__(self, *items: WriteItem) -> None:
        self.items = list(items)

    def __create_write_items__(self, fqn: str, value: object) -> list[WriteItem]:
        return self.items


def shard(fqn: str, offset: int, size: int) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size([offset]), torch.Size([size]))
    data = TensorWriteData(chunk, TensorProperties(torch.int32), torch.Size([10]))
    return WriteItem(MetadataIndex(fqn, [offset]), WriteItemType.SHARD, None, data)


def write_items(fqn: str, value: object) -> list[WriteItem]:
    """The same without columns: a record for each shard."""
    if isinstance(value, OwnItems):
        return value.items
    held = local_tensor(fqn, value)
    if held is None:
        return [WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO)]
    kind = WriteItemType.TENSOR if held.whole else WriteItemType.SHARD
    datas = [TensorWriteData(chunk, held.properties, held.size) for chunk in held.chunks]
    return [WriteItem(MetadataIndex(fqn, data.chunk.offsets), kind, None, data) for data in datas]


def test_each_value_has_its_items() -> None:
    values = local_values({"t": torch.ones(2, 3), "o": 7})
    tensor, other = values.items
    assert tensor.type is WriteItemType.TENSOR
    assert tensor.tensor_data is not None
    assert tensor.tensor_data.size == (2, 3)
    assert other.type is WriteItemType.BYTE_IO
    assert list(values.held) == ["t"]
    assert values.objects == ["o"]


def test_columns_say_what_records_would() -> None:
    state = {
        "scalar": torch.tensor(1.5),
        "grad": torch.nn.Parameter(torch.ones(2, 0, 3)),
        "object": {1, 2},
        "own": OwnItems(shard("own", 0, 4), shard("own", 6, 4)),
        "nothing": OwnItems(),
        "bits": torch.zeros(7, dtype=torch.bool),
    }
    values = local_values(state)
    columns = columns_of(values.items)
    expected = [item for fqn, value in state.items() for item in write_items(fqn, value)]
    assert len(values.items) == len(columns) == 6
    assert sorted(columns, key=str) == sorted(values.items, key=str) == sorted(expected, key=str)


def test_columns_follow_the_records() -> None:
    """They are those that were made, until a record is looked at, which may change it."""
    values = local_values({"t": torch.ones(2), "s": torch.ones(3)})
    assert columns_of(values.items) is columns_of(values.items)
    assert values.items.pop().index.fqn == "s"
    assert list(columns_of(values.items)) == values.items


def test_items_of_a_value_keep_their_order_among_others() -> None:
    items = [shard("own", 0, 4), shard("own", 4, 6)]
    values = local_values({"t": torch.ones(2), "own": OwnItems(*items), "u": torch.ones(2)})
    assert [item.index.fqn for item in values.items] == ["t", "own", "own", "u"]
    assert values.items[1:3] == items


def test_records_that_say_too_little_are_refused() -> None:
    bare = WriteItem(MetadataIndex("t", [0]), WriteItemType.TENSOR)
    thing = WriteItem(MetadataIndex("own"), WriteItemType.BYTE_IO)
    other = shard("own", 4, 6)
    assert other.tensor_data is not None
    longer = replace(other, tensor_data=replace(other.tensor_data, size=torch.Size([11])))
    flat = replace(other, tensor_data=replace(other.tensor_data, size=torch.Size([10, 1])))
    for items, text in [
        ([bare], "'t' has no tensor_data"),
        ([thing, other], "'own' is planned twice"),
        ([shard("own", 0, 4), longer], "shards of 'own' do not belong together"),
        ([flat], "another number of dimensions"),
    ]:
        with pytest.raises(PlanError, match=text):
            columns_of(items)


def test_same_memory_same_value() -> None:
    table = torch.ones(4, 2)
    assert ties(a=table, b=table, c=table.clone(), d=table.detach()) == {"b": "a", "d": "a"}


def test_different_views_of_one_memory_are_different_values() -> None:
    table = torch.ones(4, 4)
    assert ties(a=table, b=table.t(), c=table[:2], d=table.view(torch.int32), e=table.reshape(16)) == {}


def test_conjugates_are_different_values() -> None:
    table = torch.ones(2, dtype=torch.complex64)
    assert ties(a=table, b=table.conj()) == {}


def test_empty_tensors_are_never_tied() -> None:
    empty = torch.empty(0)
    assert ties(a=empty, b=empty) == {}
