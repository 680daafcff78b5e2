"""A sink that refers to lent memory gets small payloads as they are, any other gets them joined."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dcp_io import Payload, Sink
from dcp_io.writing.data_file import DataFile
from dcp_manifest.index.items import CRC_BLOCK_MIN_BYTES, Framing

SIZES = [1, 3, 64, 5000, 70_000, 300_000, 3 << 20]


class Gathering(Sink):
    """A sink in memory that notes whose buffers it gets."""

    name = "x"

    def __init__(self, *, refers: bool) -> None:
        self.refers = refers  # type: ignore[misc]
        self.data = bytearray()
        self.owners: list[object] = []

    def tell(self) -> int:
        return len(self.data)

    def write(self, buffers: Sequence[bytes | bytearray | memoryview]) -> None:
        for buffer in buffers:
            self.owners.append(memoryview(buffer).obj)
            self.data += buffer

    def close(self, *, sync: bool) -> None: ...

    def abort(self) -> None: ...


@pytest.mark.parametrize("layout", ["torch", "raw"])
def test_small_payloads_are_joined_for_sinks_that_copy(layout: str) -> None:
    values = [bytearray(bytes([number + 1]) * size) for number, size in enumerate(SIZES)]
    sinks = [Gathering(refers=refers) for refers in (True, False)]
    for sink in sinks:
        file = DataFile(sink, save_id="ab", layout=layout, sync=True, max_piece_bytes=1 << 20)
        for number, value in enumerate(values):
            file.add(f"key{number}", Payload(memoryview(value), Framing.RAW, "U8", (len(value),)))
        file.close()
    passed = [[value for value in values if any(owner is value for owner in sink.owners)] for sink in sinks]
    assert passed == [values, [value for value in values if len(value) > CRC_BLOCK_MIN_BYTES]]
    assert sinks[0].data == sinks[1].data
