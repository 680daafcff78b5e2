"""Items of local values, and ties between them."""

import torch

from dcp_core.plan import WriteItemType
from dcp_core.values import find_ties, local_values


def ties(**values: object) -> dict[str, str]:
    return find_ties(local_values(values))


def test_each_value_has_its_items() -> None:
    values = {value.fqn: value for value in local_values({"t": torch.ones(2, 3), "o": 7})}
    (tensor,) = values["t"].items
    assert tensor.type is WriteItemType.TENSOR
    assert tensor.tensor_data is not None
    assert tensor.tensor_data.size == (2, 3)
    assert values["o"].items[0].type is WriteItemType.BYTE_IO
    assert values["o"].held is None


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
