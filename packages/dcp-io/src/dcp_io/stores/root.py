"""`Root`: the protocol of a folder of checkpoints."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from dcp_io.stores.open_store import open_store
from dcp_io.stores.store import Store

_DESCRIPTION = "run.tiers.toml"


@runtime_checkable
class Root(Protocol):
    """Protocol of a folder of checkpoints in several places, such as a fast and a slow storage.

    Functions and commands accept it instead of a path or URI. Folders of the same name in two places hold copies of one
    checkpoint, or different saves of one step.
    """

    @property
    def places(self) -> Sequence[Store]:
        """The places, at least one, nearest first. Saves go to the first."""
        ...


def places_of(root: Root | Store | str | os.PathLike[str]) -> tuple[Store, ...]:
    """Return the places of a root, nearest first; a path, URI or store is a root of one place.

    A file `run.tiers.toml` stands for the root that it describes, if dcp-tiers is installed. Raises the errors of
    `open_store`.
    """
    if isinstance(root, Store):
        return (root,)
    if isinstance(root, str | os.PathLike):
        described = root_at(root)
        return (open_store(root),) if described is None else tuple(described.places)
    return tuple(root.places)


def root_at(place: str | os.PathLike[str]) -> Root | None:
    """Return the root that a file describes; None for any other path or URI.

    Raises CheckpointNotFoundError for a missing file, DcpError or OSError for an invalid or unreadable file.
    """
    name = os.fspath(place).rpartition("/")[2]
    if name != _DESCRIPTION:
        return None
    from dcp_base.imports import import_part, is_installed  # noqa: PLC0415 - as in `open_store`

    if not is_installed(name):
        return None
    found: Root = import_part(name)(place)
    return found
