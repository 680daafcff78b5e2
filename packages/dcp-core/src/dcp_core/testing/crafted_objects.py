"""Objects whose pickles contain arbitrary calls, and archives of such pickles, for tests of safe loading."""

from __future__ import annotations

import io
import pickle
import zipfile
from typing import Any

__all__ = ["Call", "Stored", "archived"]


class Call:
    """Object whose pickle calls a given function with given arguments, and optionally sets a state.

    Args:
        func: Function that unpickling calls.
        arguments: Arguments of the call.
        state: State that unpickling sets on the result of the call; None for no state.
    """

    def __init__(self, func: Any, *arguments: Any, state: Any = None) -> None:
        self.reduced = (func, arguments) if state is None else (func, arguments, state)

    def __reduce__(self) -> Any:
        return self.reduced


class Stored:
    """Object whose pickle is a given persistent id, by which `torch.save` archives refer to tensor storages."""

    def __init__(self, *pid: Any) -> None:
        self.pid = pid


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.pid if isinstance(obj, Stored) else None


def archived(value: object, *, protocol: int = 2, **records: bytes) -> bytes:
    """Return the bytes of a `torch.save` archive with a given pickle and records.

    Args:
        value: Object to pickle, or the bytes of the pickle.
        protocol: Pickle protocol.
        records: Name → contents of records in the archive's folder `data/`.
    """
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
