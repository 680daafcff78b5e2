"""Options that users choose by a word: the layout of data files, and the verification of reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

__all__ = ["Layout", "Verify", "check_layout", "check_verify"]

Layout = Literal["torch", "raw"]
"""`torch`: every tensor item is an archive that `torch.load` opens, so that stock can read the checkpoint.
`raw`: aligned bytes only, small items packed side by side; smaller and faster, not readable by stock."""

Verify = Literal["blocks", "full", "before"] | bool
"""`blocks` (or True): check the CRC blocks that a read touches; of an item with one CRC for many blocks, only a
read of the whole is checked. `full`: check whole items. `before`: as `blocks`, but everything is checked before any
destination changes. False: check nothing."""

_VERIFY = ("blocks", "full", "before", True, False)


def check_layout(layout: object) -> None:
    """Raise ValueError, naming the choices, if `layout` is none of `Layout`."""
    _check("layout", layout, get_args(Layout))


def check_verify(verify: object) -> None:
    """Raise ValueError, naming the choices, if `verify` is none of `Verify`."""
    _check("verify", verify, _VERIFY)


def _check(name: str, value: object, choices: Sequence[object]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not known; choose one of {', '.join(map(repr, choices))}")
