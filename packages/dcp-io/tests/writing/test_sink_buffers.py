"""What a sink gets: small payloads joined, large ones as they are, and read-only if their bytes stay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from dcp_io import Payload, Sink
from dcp_io.writing.write_engine import DataFile
from dcp_manifest.index.columns import CRC_BLOCK_MIN_BYTES, Framing

SIZES = [1, 3, 64, 5000, 70_000, 300_000, 3 << 20]


class Gathering(Sink):
    """A sink in memory that notes whose buffers it gets, and keeps the read-only ones."""

    name = "x"

    def __init__(self) -> None:
        self.parts: list[bytes | memoryview] = []
        self.owners: list[object] = []

    def write(self, buffers: Sequence[bytes | bytearray | memoryview]) -> None:
        for view in map(memoryview, buffers):
            self.owners.append(view.obj)
            self.parts.append(view if view.readonly else bytes(view))

    def close(self) -> None: ...

    def abort(self) -> None: ...


class Reused:
    """Bytes in pieces, in one buffer."""

    def __init__(self, data: bytes) -> None:
        self.data, self.nbytes = data, len(data)

    def pieces(self, max_bytes: int) -> Iterator[memoryview]:
        buffer = bytearray(1000)
        for start in range(0, self.nbytes, 1000):
            part = self.data[start : start + 1000]
            buffer[: len(part)] = part
            yield memoryview(buffer)[: len(part)]


@pytest.mark.parametrize("layout", ["torch", "raw"])
@pytest.mark.parametrize("reused", [False, True])
def test_read_only_buffers_stay_as_they_are(layout: str, reused: bool) -> None:
    values = [bytearray(bytes([number + 1]) * size) for number, size in enumerate(SIZES)]
    sink = Gathering()
    file = DataFile(sink, save_id="ab", layout=layout, max_piece_bytes=1 << 20)
    places = []
    for number, value in enumerate(values):
        data = Reused(bytes(value)) if reused else memoryview(value)
        places.append(file.add(f"key{number}", Payload(data, Framing.RAW, "U8", (len(value),))))
    file.close()
    stored = b"".join(sink.parts)
    assert [stored[at + lead :][:size] for at, _, lead, size, *_ in places] == values
    passed = [value for value in values if any(owner is value for owner in sink.owners)]
    assert passed == ([] if reused else [value for value in values if len(value) > CRC_BLOCK_MIN_BYTES])
