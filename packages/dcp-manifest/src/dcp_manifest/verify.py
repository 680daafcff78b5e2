"""Everything that can be said against the bytes of an index, all at once."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dcp_manifest.blob import BLOCK_BYTES, BLOCK_CRCS, WholeBlob, first_blocks, index_crc32
from dcp_manifest.errors import DcpError
from dcp_manifest.footer import FLAG_STUB_HEAD, FOOTER_BYTES, Footer, read_footer
from dcp_manifest.manifest import Buffer, decode, read_index
from dcp_manifest.stub import is_stub

__all__ = ["Problem", "verify"]


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is not as it was written."""

    message: str
    file: str
    offset: int | None = None
    """In the file, bytes; None if it is not at one place."""


def verify(data: Buffer, *, file: str) -> list[Problem]:
    """What is wrong with an index, the parts that reading does not need included; empty if nothing is.

    Args:
        data: The whole file, ours or stock's.
        file: Its name, for messages.
    """
    view = memoryview(data)
    try:
        footer = read_footer(view[-FOOTER_BYTES:], size=len(view), file=file)
        if footer is None:
            read_index(view, file=file)
            return []
    except DcpError as error:
        return [_problem(error, file)]
    return [*_head_problems(view, footer, file), *_manifest_problems(view, footer, file)]


def _problem(error: DcpError, file: str) -> Problem:
    return Problem(str(error), file, getattr(error, "offset", None))


def _head_problems(view: memoryview, footer: Footer, file: str) -> Iterator[Problem]:
    head = view[: footer.manifest_offset]
    if zlib.crc32(head) != footer.head_crc32:
        yield Problem("the head is damaged: torch.distributed.checkpoint may read something else, we do not", file, 0)
    elif is_stub(head) != bool(footer.flags & FLAG_STUB_HEAD):
        yield Problem("the footer is wrong about whether the head is a stub", file, 0)


def _manifest_problems(view: memoryview, footer: Footer, file: str) -> Iterator[Problem]:
    manifest = view[footer.manifest_offset : footer.manifest_offset + footer.manifest_bytes]
    try:
        decode(view, file=file)
    except DcpError as error:
        yield _problem(error, file)
    try:
        blob = WholeBlob(manifest, file=file)
    except DcpError as error:
        yield _problem(error, file)
        return
    if index_crc32(blob.data, blob.header) != footer.index_crc32:
        yield Problem("the manifest's header or its block CRCs are damaged", file, footer.manifest_offset)
        return
    yield from _block_problems(blob, footer, file)


def _block_problems(blob: WholeBlob, footer: Footer, file: str) -> Iterator[Problem]:
    column = blob.header.columns.get(BLOCK_CRCS)
    crcs = np.zeros(0, np.uint32) if column is None else blob.read(BLOCK_CRCS, 0, column.count)
    first, total = first_blocks(blob.header)
    if total != len(crcs):
        yield Problem(f"the manifest has {len(crcs)} block CRCs, not {total}", file, footer.manifest_offset)
        return
    for name, block in first.items():
        raw = blob.raw(name)
        for start in range(0, len(raw), BLOCK_BYTES):
            if zlib.crc32(raw[start : start + BLOCK_BYTES]) != crcs[block + start // BLOCK_BYTES]:
                place = blob.header.data_start + blob.header.extents[name][0] + start
                yield Problem(f"the column {name} is damaged", file, footer.manifest_offset + place)
