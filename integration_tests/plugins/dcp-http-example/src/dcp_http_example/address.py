"""What `http+dcp://host:port/folder` means."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from dcp_io import check_name

__all__ = ["SCHEME", "Address", "is_address", "parse_address"]

SCHEME = "http+dcp"
_FORM = re.compile(rf"(?i:{re.escape(SCHEME)})://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]):(\d{{1,5}})/(.*?)/*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Address:
    """A folder of objects on a server."""

    host: str
    port: int
    folder: str
    """Without slashes at its ends; not quoted."""

    @property
    def url(self) -> str:
        """As users write it."""
        return f"{SCHEME}://{self.host}:{self.port}/{self.folder}"


def is_address(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Whether an id has this storage's scheme."""
    return os.fspath(checkpoint_id).lower().startswith(f"{SCHEME}://")


def parse_address(checkpoint_id: str | os.PathLike[str]) -> Address:
    """The parts of an id.

    Raises:
        ValueError: It does not have the form `http+dcp://host:port/folder`.
    """
    found = _FORM.fullmatch(os.fspath(checkpoint_id))
    if found is None or not 0 < int(found[2]) < 1 << 16 or not found[3]:
        raise ValueError(f"{os.fspath(checkpoint_id)!r} is not of the form {SCHEME}://host:port/folder")
    return Address(found[1].lower(), int(found[2]), check_name(found[3]))
