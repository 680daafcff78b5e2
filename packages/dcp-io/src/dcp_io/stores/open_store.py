"""`open_store`: opens a URI's store by an installed plug-in. No torch."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dcp_base.errors import PluginNotFoundError
from dcp_base.schemes import file_path, package_for, scheme_of
from dcp_io.stores.host_store import HOST_SCHEME, HostFolder, HostStore, host_path
from dcp_io.stores.local_store import LocalStore
from dcp_io.stores.store import Store

if TYPE_CHECKING:
    from dcp_base import PluginInfo, StoreSpec

# A scheme of one letter is the drive of a Windows path.
_SCHEME = re.compile(r"[a-z][a-z0-9+.:-]+")


def open_store(uri: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> Store:
    """Open the store for the folder that a URI names.

    Args:
        uri: A path, `file://…`, `host://…` (see `HostFolder`), or a URI with a scheme of an installed package.
        storage_options: Options of the storage, such as an endpoint; see its package.

    Raises:
        PluginNotFoundError: No installed package handles the scheme; the message names the package to install.
        DcpError: Two installed packages handle the scheme.
        ValueError: The options or the URI do not fit the storage.
        InvalidPlaceError: The path is empty, or looks like a URI that lost a slash.

    Ranks: one; sends no request to the storage.
    """
    text, scheme = os.fspath(uri), scheme_of(uri)
    if scheme in ("file", HOST_SCHEME):
        if storage_options:
            raise ValueError(
                f"{text}: a directory of the file system takes no storage_options, got {[*storage_options]}"
            )
        if scheme == "file":
            return LocalStore(file_path(text))
        own, also = HostStore.split(text)
        return HostFolder(host_path(own), also=[open_store(one) for one in also])
    from dcp_base import PluginLoadError, PluginNotFoundError, installed  # noqa: PLC0415 - slow

    try:
        spec, plugin = installed.find("stores", scheme)
    except PluginNotFoundError:
        return _store_of_any(text, scheme, storage_options, "")
    except PluginLoadError as error:
        return _store_of_any(text, scheme, storage_options, f"; {error}")
    store: Store = _opener(spec, plugin, text)(text, storage_options=storage_options)
    return store


def _store_of_any(text: str, scheme: str, storage_options: Mapping[str, Any] | None, reasons: str) -> Store:
    from dcp_base import ANY_SCHEME, installed  # noqa: PLC0415 - as in `open_store`

    if not _SCHEME.fullmatch(scheme):
        raise PluginNotFoundError(
            f"{text} is not a URI: {scheme!r} is not a scheme; for a path of that name write ./{text}"
        )
    for spec, plugin in installed.offered("stores", ANY_SCHEME):
        try:
            store: Store = _opener(spec, plugin, text)(text, storage_options=storage_options)
        except ValueError as error:
            reasons = f"{reasons}; {error}"
        else:
            return store
    raise PluginNotFoundError(
        f"{text}: no installed package opens {scheme}:// stores; install {package_for(scheme)}, from "
        f"the source of your other dcp packages{reasons}"
    )


def file_at(uri: str | os.PathLike[str]) -> tuple[Store, str] | None:
    """Open the folder of a URI's file; returns store and file name, or None without such a file.

    Raises the errors of `open_store`, and OSError if the storage failed.
    """
    above, slash, name = os.fspath(uri).rpartition("/")
    if not name or above.endswith("/"):  # a folder, or a whole bucket
        return None
    store = open_store(above or slash or ".")
    return (store, name) if store.exists(name) else None


def _opener(spec: StoreSpec, plugin: PluginInfo, uri: str) -> Callable[..., Store]:
    from dcp_base import PluginLoadError, resolve  # noqa: PLC0415 - as in `open_store`

    try:
        function: Callable[..., Store] = resolve(spec.opener, plugin)
    except PluginLoadError as error:
        missing, owner = error.__cause__, (plugin.distribution or plugin.name).split(" ")[0]
        if not isinstance(missing, ImportError):
            raise PluginNotFoundError(f"{uri}: {error}") from error
        raise PluginNotFoundError(
            f"{uri}: {owner} opens such stores, and needs {missing.name or missing}, which is not installed; pip "
            f"install {owner} installs what it needs"
        ) from error
    return function
