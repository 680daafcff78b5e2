"""Whether an archive that came out of transforms matches the CRCs in it.

Where an item lies bare in a file, the engine below checks it as it reads. What stock compressed has no other CRC than
those of the archive within, which show only when it is decoded.
"""

from __future__ import annotations

import io
import zipfile

__all__ = ["archive_problem"]

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
            if sum(record.file_size for record in records) > len(data):
                return "its records say that they are longer than it is"
            if records and not any(record.CRC for record in records):
                return None
            bad = archive.testzip()
    except Exception as error:  # noqa: BLE001 - whatever zipfile cannot read is damaged
        return f"its archive cannot be read: {type(error).__name__}: {error}"
    return None if bad is None else f"the record {bad!r} of its archive does not match its CRC"
