"""Which host is whose partner."""

from __future__ import annotations

import pytest

from dcp_memory.partners.copying import partners_of
from dcp_memory.partners.courier import pack_numbers, unpack_numbers


@pytest.mark.parametrize(
    ("machines", "partners"),
    [
        ([], {}),
        ([[0]], {}),
        ([[0, 2]], {}),
        ([[0], [2]], {0: 2, 2: 0}),
        ([[0], [1], [5]], {0: 1, 1: 5, 5: 0}),
        ([[0, 4], [1]], {0: 1, 4: 1, 1: 0}),
        ([[0, 4, 6], [1, 2]], {0: 1, 4: 2, 6: 1, 1: 0, 2: 4}),
    ],
)
def test_partners_are_on_the_next_machine(machines: list[list[int]], partners: dict[int, int]) -> None:
    assert partners_of(machines) == partners
    of = {leader: number for number, machine in enumerate(machines) for leader in machine}
    assert all(of[leader] != of[other] for leader, other in partners.items())


@pytest.mark.parametrize("numbers", [[], [0], [7, 8], [3, 700, 701]])
def test_numbers_are_packed(numbers: list[int]) -> None:
    assert list(unpack_numbers(pack_numbers(numbers, max(numbers, default=-1) + 1))) == numbers
