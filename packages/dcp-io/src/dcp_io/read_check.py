"""Whether bytes that were read are those that were written; the errors that say where they are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dcp_io.crc import combine, crc32, crc_at
from dcp_io.zip_check import is_zip, verify_zip
from dcp_manifest.errors import CorruptCheckpointError
from dcp_manifest.items import Framing, StoredItem, block_bytes

__all__ = ["check_archive", "check_blocks", "check_whole"]


def check_blocks(key: str, item: StoredItem, start: int, stop: int, buffers: Sequence[memoryview]) -> None:
    """Compare [start, stop) of a stored range, which begins and ends where CRCs are recorded, with those CRCs.

    Raises:
        CorruptCheckpointError: They differ; names the first block that does.
    """
    value = crc_at(item, start)
    for buffer in buffers:
        value = crc32(buffer, value)
    if value == crc_at(item, stop):
        return
    data = b"".join(buffers)
    block = block_bytes(item.stored_bytes) if item.running_crcs is not None else item.stored_bytes
    bad = start
    for bad in range(start, stop, block):
        end = min(stop, bad + block)
        if crc32(data[bad - start : end - start], crc_at(item, bad)) != crc_at(item, end):
            break
    raise _damage(key, item, bad, min(stop, bad + block))


def check_whole(key: str, item: StoredItem, crcs: Mapping[int, tuple[int, int]]) -> None:
    """Compare the CRC32s and lengths of all parts of a stored range, by position, with the item's only CRC.

    Raises:
        CorruptCheckpointError: They differ.
    """
    value = 0
    for position in sorted(crcs):
        value = combine(value, *crcs[position])
    if value != item.crc32:
        raise _damage(key, item, 0, item.stored_bytes)


def check_archive(key: str, item: StoredItem, data: memoryview) -> bool:
    """Whether the CRCs inside a whole archive vouch for it; False if its writer left them out.

    Raises:
        CorruptCheckpointError: They do not match, or a tensor's archive is none.
    """
    verdict = verify_zip(data)
    if verdict is False or (item.framing is Framing.TORCH_ZIP and not is_zip(data)):
        raise CorruptCheckpointError(
            "the stored archive is damaged: its bytes do not match its CRCs; load another checkpoint",
            file=item.file,
            key=key,
            offset=item.offset,
        )
    return verdict is True


def _damage(key: str, item: StoredItem, start: int, stop: int) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"bytes {start} to {stop} of the stored data differ from what was written: the file is damaged or was swapped; "
        "load another checkpoint",
        file=item.file,
        key=key,
        offset=item.offset + item.lead + start,
    )
