"""`open_store`: the store of a URI, whoever brings it. Looks up entry points when called, and needs no torch.

A package that brings stores names, for each URI scheme, a function of a URI and options in the entry-point group
`dcp.stores`: `s3 = "my_package.opening:open_store"`. A package that can do many schemes, but none better than a
specialised one, uses the group `dcp.stores.fallback`; it is also asked for schemes that are not registered, and raises
ValueError for those that it does not know. The module must not import torch: looking at
checkpoints should not wait for it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dcp_io.errors import StoreNotFoundError
from dcp_io.stores.local_store import LocalStore
from dcp_io.stores.store import Store
from dcp_manifest.schemes import file_path, package_for, scheme_of

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["FALLBACK_GROUP", "GROUP", "file_at", "open_store", "scheme_of"]

# Of one letter are drives of another system, which some libraries take for paths of this one.
_SCHEME = re.compile(r"[a-z][a-z0-9+.:-]+")
GROUP = "dcp.stores"
FALLBACK_GROUP = "dcp.stores.fallback"


def open_store(uri: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> Store:
    """The folder that a URI names.

    Args:
        uri: A path, `file://…`, or a URI whose scheme an installed package handles.
        storage_options: What the storage needs to be told, such as an endpoint; the package that brings it says what.

    Raises:
        StoreNotFoundError: No installed package handles the scheme; names the one to install.
        ValueError: The options or the URI do not fit the storage.
        InvalidPlaceError: The path is empty, or a URI that has lost a slash.

    Ranks: one; nothing is asked of the storage.
    """
    text, scheme = os.fspath(uri), scheme_of(uri)
    if scheme == "file":
        if storage_options:
            raise ValueError(f"{text}: a folder of the file system takes no storage_options, got {[*storage_options]}")
        return LocalStore(file_path(text))
    import importlib.metadata  # noqa: PLC0415 - takes long, and folders need none of it

    for group in (GROUP, FALLBACK_GROUP):
        points = sorted(importlib.metadata.entry_points(group=group, name=scheme), key=lambda point: point.value)
        if len({point.value for point in points}) > 1:
            owners = " and ".join(sorted({point.dist.name if point.dist else point.value for point in points}))
            raise StoreNotFoundError(f"stores for {scheme}:// are offered by {owners}; uninstall one of them")
        if points:
            store: Store = _load(points[0], text)(text, storage_options=storage_options)
            return store
    return _store_of_any(text, scheme, storage_options)


def _store_of_any(text: str, scheme: str, storage_options: Mapping[str, Any] | None) -> Store:
    """The folder, opened by a package that is asked for schemes that are not registered; raises StoreNotFoundError."""
    import importlib.metadata  # noqa: PLC0415 - as in `open_store`

    reasons: list[str] = []
    if not _SCHEME.fullmatch(scheme):
        raise StoreNotFoundError(f"{text} is no URI: {scheme!r} is no scheme; for a path of that name write ./{text}")
    fallbacks = {point.value: point for point in importlib.metadata.entry_points(group=FALLBACK_GROUP)}
    for _, point in sorted(fallbacks.items()):
        try:
            store: Store = point.load()(text, storage_options=storage_options)
        except ValueError as error:
            reasons.append(f"; {error}")
        else:
            return store
    raise StoreNotFoundError(
        f"{text}: no installed package opens {scheme}:// stores; pip install {package_for(scheme)}{''.join(reasons)}"
    )


def file_at(uri: str | os.PathLike[str]) -> tuple[Store, str] | None:
    """The store of the folder above a single file that a URI names, and the file's name; None if there is no such file.

    Raises:
        StoreNotFoundError, InvalidPlaceError: As `open_store`.
        StorageError, OSError: The storage failed.
    """
    above, _, name = os.fspath(uri).rpartition("/")
    if not name or above.endswith("/"):  # a folder, or a whole container
        return None
    store = open_store(above)
    return (store, name) if store.exists(name) else None


def _load(point: EntryPoint, uri: str) -> Callable[..., Store]:
    try:
        function: Callable[..., Store] = point.load()
    except ImportError as error:
        owner = point.dist.name if point.dist else point.value
        raise StoreNotFoundError(
            f"{uri}: {owner} opens such stores, and needs {error.name or error}, which is not installed; pip install "
            f"{owner} installs what it needs"
        ) from error
    return function
