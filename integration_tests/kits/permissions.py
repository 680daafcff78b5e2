"""File modes that restrict root."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

__all__ = ["modes_count"]

_VERSION = 0x20080522
_DAC_OVERRIDE_AND_READ_SEARCH = 0b110


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


@contextlib.contextmanager
def modes_count() -> Iterator[None]:
    """File modes count for this thread, and threads that it starts, even as root.

    Example:
        ```python
        import pathlib

        from integration_tests.kits.permissions import modes_count

        path = pathlib.Path("secret")
        path.write_text("x")
        path.chmod(0)
        with modes_count():
            try:
                path.read_text()
            except PermissionError as error:
                print(error)
        ```
    """
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = _Header(_VERSION, 0), (_Sets * 2)()
    _call(libc.capget, header, sets)
    before = sets[0].effective
    sets[0].effective = before & ~_DAC_OVERRIDE_AND_READ_SEARCH
    _call(libc.capset, header, sets)
    try:
        yield
    finally:
        sets[0].effective = before
        _call(libc.capset, header, sets)


def _call(function: ctypes._NamedFuncPointer, header: _Header, sets: ctypes.Array[_Sets]) -> None:
    if function(ctypes.byref(header), sets) != 0:
        raise OSError(ctypes.get_errno(), "the capabilities of this thread cannot be changed")
