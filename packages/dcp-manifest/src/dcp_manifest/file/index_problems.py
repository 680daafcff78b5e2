"""Verification of an index file: all problems, not only the first."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dcp_base.errors import DcpError
from dcp_manifest.errors import CorruptCheckpointError
from dcp_manifest.file.blob import (
    BLOCK_BYTES,
    BLOCK_CRCS,
    FLAG_STUB_HEAD,
    Footer,
    first_blocks,
    index_crc32,
)
from dcp_manifest.file.manifest_read import IndexFile
from dcp_manifest.index.columns import CheckpointIndex
from dcp_manifest.stock.stock_write import is_stub
from dcp_manifest.types import Buffer


@dataclass(frozen=True, slots=True)
class Problem:
    """Bytes of a checkpoint that differ from what was written."""

    message: str
    file: str | None = None
    key: str | None = None
    """Key of the damaged value; of several, the first."""
    offset: int | None = None
    """Offset in the file, bytes; None for several."""
    lost_keys: tuple[str, ...] = ()
    """Keys of all values that a missing or truncated file loses, in file order."""

    def __str__(self) -> str:
        facts = {"file": self.file, "key": self.key, "offset": self.offset}
        where = ", ".join(f"{name} {value!r}" for name, value in facts.items() if value is not None)
        return f"{self.message} ({where})" if where else self.message


@dataclass(frozen=True, slots=True)
class Examined:
    """A file's index or error, and its problems."""

    index: CheckpointIndex | DcpError
    problems: tuple[Problem, ...] = ()

    def decoded(self) -> CheckpointIndex:
        """Return the index, or raise the error."""
        if isinstance(self.index, DcpError):
            raise self.index
        return self.index


def examine(data: Buffer, *, file: str) -> Examined:
    """Decode an index file once, of any writer; find all problems, also in bytes that readers ignore."""
    found: IndexFile | None = None
    index: CheckpointIndex | DcpError
    try:
        found = IndexFile(data, file=file)
        index = found.read()
    except DcpError as error:
        index = error
    problems = [_problem(index, file)] if isinstance(index, DcpError) else []
    if found is not None and found.footer is not None:
        problems = [
            *_head_problems(found.view, found.footer, file),
            *problems,
            *_manifest_problems(found, found.footer),
        ]
    return Examined(index, tuple(problems))


def _problem(error: DcpError, file: str) -> Problem:
    return Problem(str(error), file, offset=error.offset if isinstance(error, CorruptCheckpointError) else None)


def _head_problems(view: memoryview, footer: Footer, file: str) -> Iterator[Problem]:
    head = view[: footer.manifest_offset]
    if zlib.crc32(head) != footer.head_crc32:
        yield Problem(
            "the head is damaged: torch.distributed.checkpoint may read wrong values, this reader ignores it",
            file,
            offset=0,
        )
    elif is_stub(head) != bool(footer.flags & FLAG_STUB_HEAD):
        yield Problem("the footer contradicts the head on whether it is a stub", file, offset=0)


def _manifest_problems(found: IndexFile, footer: Footer) -> Iterator[Problem]:
    try:
        blob = found.blob
    except DcpError as error:
        yield _problem(error, found.file)
        return
    if index_crc32(blob.data, blob.header) != footer.index_crc32:
        yield Problem("the manifest's header or its block CRCs are damaged", found.file, offset=footer.manifest_offset)
        return
    column = blob.header.columns.get(BLOCK_CRCS)
    crcs = np.zeros(0, np.uint32) if column is None else blob.read(BLOCK_CRCS)
    first, total = first_blocks(blob.header)
    if total != len(crcs):
        yield Problem(
            f"the manifest has {len(crcs)} block CRCs, not {total}", found.file, offset=footer.manifest_offset
        )
        return
    for name, block in first.items():
        place, stop = (blob.header.data_start + position for position in blob.header.extents[name])
        for number, start in enumerate(range(place, stop, BLOCK_BYTES), block):
            if zlib.crc32(blob.data[start : min(stop, start + BLOCK_BYTES)]) != crcs[number]:
                yield Problem(f"the column {name} is damaged", found.file, offset=footer.manifest_offset + start)
