"""CRC checks of a data file's items while the file's bytes pass in order."""

from __future__ import annotations

from collections import defaultdict

from dcp_io.archives.crc import crc32
from dcp_manifest.errors import CorruptCheckpointError
from dcp_manifest.index.columns import CheckpointIndex

__all__ = ["PassingCrcs", "spans_by_file"]

Span = tuple[int, int, int]
"""Begin and end of an item's stored range in its file, and the CRC32 of the range."""


def spans_by_file(index: CheckpointIndex) -> dict[str, list[Span]]:
    """Return the stored ranges with a CRC in each data file, in the order of the file."""
    spans: dict[str, set[Span]] = defaultdict(set)
    for items in (index.chunk_items, index.object_items):
        if items is None:
            continue
        starts = items.offset + items.lead
        rows = zip(
            items.file.tolist(),
            starts.tolist(),
            (starts + items.stored_bytes).tolist(),
            items.crc32.tolist(),
            items.checked.tolist(),
            strict=True,
        )
        for file, start, stop, crc, checked in rows:
            if checked:
                spans[index.files[file]].add((start, stop, crc))
    return {name: sorted(found) for name, found in spans.items()}


class PassingCrcs:
    """Check of one file: each item's CRC is compared as soon as its last byte has passed.

    Args:
        name: Name of the file, for messages.
        spans: The file's ranges, from `spans_by_file`.

    Example:
        ```python
        from zlib import crc32

        from dcp_io import PassingCrcs
        from dcp_manifest import CorruptCheckpointError

        crcs = PassingCrcs("rank0.data", [(0, 6, crc32(b"abcdef"))])
        crcs.take(0, memoryview(b"abc"))
        try:
            crcs.take(3, memoryview(b"dXf"))
        except CorruptCheckpointError as error:
            print(error)
        ```
    """

    def __init__(self, name: str, spans: list[Span]) -> None:
        self._name = name
        self._spans = spans
        self._next = 0
        self._crc = 0

    def take(self, position: int, piece: memoryview) -> None:
        """Check the next bytes of the file.

        Args:
            position: Offset of the piece in the file: the end of the piece before.
            piece: The bytes.

        Raises:
            CorruptCheckpointError: An item that ends in this piece differs from what was saved.
        """
        end = position + len(piece)
        while self._next < len(self._spans):
            start, stop, wanted = self._spans[self._next]
            if start > end:
                return
            self._crc = crc32(piece[max(start - position, 0) : max(min(stop, end) - position, 0)], self._crc)
            if stop > end:
                return
            if self._crc != wanted:
                raise CorruptCheckpointError(
                    f"bytes {start} to {stop} differ from what was saved; they are not copied",
                    file=self._name,
                    offset=start,
                )
            self._next, self._crc = self._next + 1, 0
