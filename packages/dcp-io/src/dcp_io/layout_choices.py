"""Options with named choices: `Layout` of data files, and `Verify` (CRC checks of reads)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

__all__ = ["Layout", "Verify", "check_layout", "check_verify"]

Layout = Literal["torch", "raw"]
"""Layout of data files. `torch`: every tensor item is an archive that `torch.load` opens; stock can read the
checkpoint. `raw`: aligned bytes only, small items packed side by side; smaller and faster, not readable by stock."""

Verify = Literal["blocks", "full", "before"] | bool
"""CRC checks of the data that are read. `blocks` (or True): check the CRC blocks that a read overlaps; an item with a
single CRC is checked only if the whole item is read. `full`: check whole items, even if only a slice is requested.
`before`: like `blocks`, but all data are checked before any destination changes (read twice). False: no checks."""

_VERIFY = ("blocks", "full", "before", True, False)


def check_layout(layout: object) -> None:
    """Raise ValueError, naming the choices, if `layout` is not a valid `Layout`."""
    _check("layout", layout, get_args(Layout))


def check_verify(verify: object) -> None:
    """Raise ValueError, naming the choices, if `verify` is not a valid `Verify`."""
    _check("verify", verify, _VERIFY)


def _check(name: str, value: object, choices: Sequence[object]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not known; choose one of {', '.join(map(repr, choices))}")
