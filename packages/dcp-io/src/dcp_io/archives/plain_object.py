"""Values of stored objects without torch: numbers, text, bytes, and lists, tuples, sets and dicts of them.

Objects are stored as `torch.save` archives. Other values (tensors, arrays, classes) are read by `dcp_core.objects`.
"""

from __future__ import annotations

from typing import Any, NoReturn

from dcp_io.archives.archive_checks import refuse_bomb, zip_records
from dcp_manifest.errors import CorruptCheckpointError
from dcp_manifest.pickles.pickle_table import ForbiddenGlobalError, PickleTable
from dcp_manifest.pickles.safe_pickle import read_pickle
from dcp_manifest.pickles.unfolding import refuse_unfolding

__all__ = ["read_plain_object"]


def read_plain_object(data: bytes) -> Any:
    """Return the value of a stored object, if it consists of plain values only; nothing in it is called.

    Args:
        data: The archive, whose CRCs have been checked.

    Raises:
        ValueError: The bytes are no such archive, or contain other values; see `dcp_manifest.ForbiddenGlobalError`.

    Example:
        ```python
        import io
        import torch
        from dcp_io import read_plain_object

        stored = io.BytesIO()
        torch.save({"lr": 0.1, "tags": ["a"]}, stored)
        assert read_plain_object(stored.getvalue()) == {"lr": 0.1, "tags": ["a"]}
        ```
    """
    records = zip_records(data)
    refuse_bomb(records, len(data))
    found = [record for record in records if record.name.endswith("/data.pkl") and not record.deflated]
    if len(found) != 1:
        raise CorruptCheckpointError("the stored object is no archive of torch.save")
    start = found[0].start
    value, _ = read_pickle(data[start : start + found[0].stored_bytes], _TABLE)
    refuse_unfolding(value, len(data))
    return value


def _find(path: str) -> NoReturn:
    raise ForbiddenGlobalError(path)


_TABLE = PickleTable(find=_find)
