from __future__ import annotations

import numpy as np

from dcp_exchange import Assignment


def test_readers_of_a_piece_are_those_of_its_class() -> None:
    assignment = Assignment(
        names=("a",),
        objects=np.zeros(3, np.int32),
        starts=np.array([0, 10, 30]),
        stops=np.array([10, 20, 60]),
        owners=np.array([0, 2, 0], np.int32),
        classes=np.array([0, 1, 0], np.int32),
        borders=np.array([0, 2, 5]),
        readers=np.array([0, 1, 1, 2, 3], np.int32),
    )
    assert [assignment.readers_of(piece).tolist() for piece in range(3)] == [[0, 1], [1, 2, 3], [0, 1]]
    assert assignment.total_bytes == 50
