"""Objects with arbitrary calls in their pickles, for tests of safe loading."""

from __future__ import annotations

import io
import pickle
import zipfile
from typing import Any

__all__ = ["Call", "Stored", "archived"]


class Call:
    """Object that pickles as `func(*arguments)`, with an optional state."""

    def __init__(self, func: Any, *arguments: Any, state: Any = None) -> None:
        self.reduced = (func, arguments) if state is None else (func, arguments, state)

    def __reduce__(self) -> Any:
        return self.reduced


class Stored:
    """Object that pickles as a persistent id, like a storage."""

    def __init__(self, *pid: Any) -> None:
        self.pid = pid


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.pid if isinstance(obj, Stored) else None


def archived(value: object, *, protocol: int = 2, **records: bytes) -> bytes:
    """Return an object's or pickle's `torch.save` archive, with records in `data/`."""
    pickled = io.BytesIO()
    if isinstance(value, bytes):
        pickled.write(value)
    else:
        _Pickler(pickled, protocol).dump(value)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("archive/data.pkl", pickled.getvalue())
        file.writestr("archive/byteorder", "little")
        for name, data in records.items():
            file.writestr(f"archive/data/{name}", data)
    return buffer.getvalue()
