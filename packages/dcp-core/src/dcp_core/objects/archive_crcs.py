"""Whether an archive may be opened: it matches the CRCs in it, and does not become more than it is.

Where an item lies bare in a file, the engine below checks its CRCs as it reads. What stock compressed has no other CRC
than those of the archive within, which show only when it is decoded.
"""

from __future__ import annotations

import io
import zipfile

__all__ = ["archive_problem", "refuse_bomb"]

_BOMB = "its records say that they are longer than it is"
_MAGIC = b"PK\x03\x04"


def archive_problem(data: memoryview | bytearray | bytes) -> str | None:
    """What is wrong with the bytes of an archive; None if nothing is, or if nothing can be said.

    Nothing can be said of bytes that do not begin as an archive does, and of one whose writer left its CRCs out. No
    more is inflated than the bytes that there are: `torch.save` stores its records.
    """
    if bytes(data[:4]) != _MAGIC:
        return None
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            records = [record for record in archive.infolist() if record.file_size]
            if _is_bomb(archive, len(data)):
                return _BOMB
            if records and not any(record.CRC for record in records):
                return None
            bad = archive.testzip()
    except Exception as error:  # noqa: BLE001 - whatever zipfile cannot read is damaged
        return f"its archive cannot be read: {type(error).__name__}: {error}"
    return None if bad is None else f"the record {bad!r} of its archive does not match its CRC"


def refuse_bomb(archive: zipfile.ZipFile, nbytes: int) -> None:
    """Make sure that the records of an archive of `nbytes` take no more than it has: `torch.save` compresses none.

    Raises:
        ValueError: They do.
    """
    if _is_bomb(archive, nbytes):
        raise ValueError(_BOMB)


def _is_bomb(archive: zipfile.ZipFile, nbytes: int) -> bool:
    """Also for records that share their bytes, of which one may seem to be many."""
    return sum(record.file_size for record in archive.infolist()) > nbytes
