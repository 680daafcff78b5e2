"""Roots of training runs: `Root`, the protocol of a folder of checkpoints, whatever it is made of."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from dcp_io.stores.open_store import open_store
from dcp_io.stores.store import Store

__all__ = ["Root", "places_of", "root_at"]

_DESCRIPTION_SUFFIX = ".toml"


@runtime_checkable
class Root(Protocol):
    """Protocol of a folder of checkpoints that is made of several places, such as a fast and a slow storage.

    Functions and commands that take a root as a path or URI take such an object, too. Each place has a folder for each
    of its checkpoints; folders of the same name in two places hold copies of one checkpoint, or different saves of one
    step.
    """

    @property
    def places(self) -> Sequence[Store]:
        """The places, at least one, by ascending distance: checkpoints are saved to the first."""
        ...


def places_of(root: Root | Store | str | os.PathLike[str]) -> tuple[Store, ...]:
    """Return the places of a root, nearest first; a path, URI or store is a root of one place.

    A path or URI of a file that describes a root, such as `run.tiers.toml`, stands for that root if the package that
    reads it is installed: see `dcp_hooks.HookSpecs.dcp_register_roots`.

    Raises:
        StoreNotFoundError, InvalidPlaceError, ValueError: See `open_store`.

    Example:
        ```python
        from dcp_io import LocalStore, latest_valid, places_of

        class NearAndFar:
            places = (LocalStore("near"), LocalStore("far"))

        assert len(places_of(NearAndFar())) == 2
        assert latest_valid(NearAndFar()) is None
        ```
    """
    if isinstance(root, Store):
        return (root,)
    if isinstance(root, str | os.PathLike):
        described = root_at(root)
        return (open_store(root),) if described is None else tuple(described.places)
    return tuple(root.places)


def root_at(place: str | os.PathLike[str]) -> Root | None:
    """Return the root that a file describes; None for the path or URI of anything else.

    Raises:
        CheckpointNotFoundError: There is no such file.
        DcpError, OSError: The file does not describe a root, or cannot be read.
    """
    name = os.fspath(place).rpartition("/")[2]
    if not name.endswith(_DESCRIPTION_SUFFIX):  # most folders: without looking for plug-ins, which takes time
        return None
    from dcp_hooks import installed  # noqa: PLC0415 - slow

    if name not in installed.names("roots"):
        return None
    found: Root = installed.factory("roots", name)(place)
    return found
