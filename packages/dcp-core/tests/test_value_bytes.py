"""Equal values give equal bytes, whichever of their parts are one object; others give others."""

from __future__ import annotations

from collections import OrderedDict
from datetime import date
from typing import Any

import numpy as np
import pytest
import torch

from dcp_core.value_bytes import value_bytes


def word(text: str) -> str:
    """A string that is no other object."""
    return "".join(list(text))


@pytest.mark.parametrize(
    "wrap", [tuple, lambda pair: OrderedDict(zip("ab", pair, strict=True))], ids=["plain", "other"]
)
@pytest.mark.parametrize("value", [lambda: word("abc"), lambda: 1.5 * len("ab"), lambda: (word("x"), 2.0)])
def test_one_object_twice_is_two_equal_ones(wrap: Any, value: Any) -> None:
    one = value()
    assert value_bytes(wrap([one, one])) == value_bytes(wrap([value(), value()]))


@pytest.mark.parametrize(
    "make",
    [
        lambda element: (torch.full((3,), element), "beside"),
        lambda element: {"t": [torch.full((2, 4), element).T]},
        lambda element: OrderedDict(a=np.full(3, element)),
        lambda element: (date(2026, 1, int(element)), {1, 2}),
    ],
    ids=["tensor", "strided", "array", "date"],
)
def test_elements_tell_values_apart(make: Any) -> None:
    assert value_bytes(make(1.0)) == value_bytes(make(1.0))
    assert value_bytes(make(1.0)) != value_bytes(make(2.0))


def test_dtype_and_shape_tell_tensors_apart() -> None:
    made = [torch.zeros(4), torch.zeros(4, dtype=torch.int32), torch.zeros(2, 2), torch.nn.Parameter(torch.zeros(4))]
    assert len({value_bytes((tensor,)) for tensor in made}) == len(made)


def test_what_contains_itself_is_refused() -> None:
    value: list[Any] = [OrderedDict()]
    value.append(value)
    with pytest.raises(ValueError, match="cyclic"):
        value_bytes(value)
