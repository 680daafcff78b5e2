"""Registry of plug-ins, and their discovery by entry point.

The registry has one table for each kind of entry (storages, transforms, savers, …): name → what a plug-in offers under
this name. The names of the tables are the keys of `tables.TABLES`.

Entry points are read on the first search. A plug-in whose import fails is recorded as broken; its error is raised only
when no working plug-in offers the requested name.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pluggy

from dcp_hooks.errors import ERROR_TYPES, ErrorTypes
from dcp_hooks.hookspecs import ENTRY_POINT_GROUP, PROJECT_NAME, CheckpointEvent, HookSpecs
from dcp_hooks.logs import logger
from dcp_hooks.tables import TABLES

__all__ = ["PluginInfo", "PluginRegistry", "installed", "resolve"]

_REGISTERS = "dcp_register_"


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """Description of one plug-in, working or broken.

    Args:
        name: Name of the entry point.
        distribution: Name and version of the plug-in's distribution; None if `register` added the plug-in.
        error: Text of the error that made the plug-in unusable; None if the plug-in works.
        offers: Table name (`storage`, `transforms`, …) → names that the plug-in offers in that table.
        module: Module that the entry point names; None if `register` added the plug-in.
        hooks: Names of the hooks that the plug-in implements; empty if its module cannot be imported.
    """

    name: str
    distribution: str | None = None
    error: str | None = None
    offers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    module: str | None = None
    hooks: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.distribution or 'a plugin registered by hand'} (entry point {self.name!r})"


class PluginRegistry:
    """Registry of the plug-ins that entry points name or that `register` adds. Thread-safe.

    Args:
        group: Entry-point group to read.

    Example:
        ```python
        from dcp_hooks import PluginRegistry

        registry = PluginRegistry()
        print(registry.names("storage"))  # schemes such as `file` and `s3`
        ```
    """

    def __init__(self, group: str = ENTRY_POINT_GROUP) -> None:
        self._group = group
        self._lock = threading.RLock()
        self._manager = pluggy.PluginManager(PROJECT_NAME)
        self._manager.add_hookspecs(HookSpecs)
        self._plugins: list[PluginInfo] = []
        self._offers: dict[str, dict[str, list[tuple[Any, PluginInfo]]]] = {table: {} for table in TABLES}
        self._discovered = False
        self._diverted: Callable[[CheckpointEvent], object] | None = None

    def register(self, plugin: object, name: str, *, errors: ErrorTypes = ERROR_TYPES) -> None:
        """Register a plug-in object under a name, as if an entry point named it.

        Raises:
            PluginLoadError: A hook of the plug-in is unknown, fails or returns invalid entries.
        """
        self.discover()
        with self._lock:
            info = self._add(PluginInfo(name), plugin)
            if info.error is not None:
                self._plugins.remove(info)
                raise errors.load(f"plugin {name!r} is not valid: {info.error}")

    def unregister(self, name: str, *, errors: ErrorTypes = ERROR_TYPES) -> None:
        """Remove the plug-in that `register` added under this name.

        Raises:
            PluginNotFoundError: `register` has added no plug-in under this name.
        """
        with self._lock:
            info = next((info for info in self._plugins if info.name == name and info.distribution is None), None)
            if info is None:
                raise errors.not_found(f"no plugin was registered by hand under the name {name!r}")
            self._plugins.remove(info)
            self._manager.unregister(name=_manager_name(info))
            for names in self._offers.values():
                for offered in names.values():
                    offered[:] = [pair for pair in offered if pair[1] is not info]

    def list(self) -> tuple[PluginInfo, ...]:
        """Return the descriptions of all plug-ins, broken ones included, in the order of discovery."""
        self.discover()
        return tuple(self._plugins)

    def names(self, table: str) -> tuple[str, ...]:
        """Return the sorted names that plug-ins offer in a table, such as the schemes in the table `storage`."""
        self.discover()
        return tuple(sorted(name for name, offered in self._offers[table].items() if offered))

    def find(self, table: str, name: str, *, errors: ErrorTypes = ERROR_TYPES) -> tuple[Any, PluginInfo]:
        """Return the entry that a plug-in offers under a name, and the description of that plug-in.

        An entry is a record such as `StorageBackendSpec`, or a text `module:attribute`, depending on the table.

        Args:
            table: Name of the table, one of `tables.TABLES`: `storage`, `stores`, `transforms`, …
            name: Name in that table.
            errors: Classes of the errors to raise.

        Raises:
            PluginNotFoundError: No plug-in offers the name; the message names the package to install.
            PluginLoadError: No plug-in offers the name, but a broken plug-in may.
            DuplicatePluginError: Two plug-ins offer the name.
        """
        self.discover()
        offered = self._offers[table].get(name, [])
        if len(offered) > 1:
            offered = [pair for pair in offered if not getattr(pair[0], "fallback", False)] or offered
        what = TABLES[table].entry_named(name)
        if len(offered) > 1:
            raise errors.duplicate(
                f"{what} is offered by {' and by '.join(str(info) for _, info in offered)}; uninstall one of them"
            )
        if offered:
            return offered[0]
        broken = [info for info in self._plugins if info.error is not None]
        if broken:
            reasons = "; ".join(f"{info}: {info.error}" for info in broken)
            raise errors.load(f"no working plugin offers {what}. Broken plugins that may offer it: {reasons}")
        known = ", ".join(self.names(table)) or "nothing"
        remedy = TABLES[table].remedy_for(name)
        raise errors.not_found(f"no installed plugin offers {what} (installed: {known}); {remedy}")

    def offered(self, table: str, name: str) -> tuple[tuple[Any, PluginInfo], ...]:
        """Return pairs (entry, description of its plug-in) for a name in a table, in the order of discovery."""
        self.discover()
        return tuple(self._offers[table].get(name, ()))

    def factory(self, table: str, name: str, *, errors: ErrorTypes = ERROR_TYPES) -> Any:
        """Import the factory that a plug-in offers under a name in a table, and return it. Raises like `find`."""
        path, info = self.find(table, name, errors=errors)
        return resolve(path, info, errors=errors)

    def import_offers(self, info: PluginInfo) -> None:
        """Import every `module:attribute` that a plug-in offers, as a check.

        Raises:
            PluginLoadError: A `module:attribute` cannot be imported.
        """
        for table, names in info.offers.items():
            for entry in (entry for name in names for entry, owner in self._offers[table][name] if owner is info):
                for path in TABLES[table].paths(entry):
                    resolve(path, info)

    @property
    def observed(self) -> bool:
        """Whether events have an observer: the hook of a plug-in, or the function set by `divert_events`."""
        if self._diverted is not None:
            return True
        self.discover()
        return bool(self._manager.hook.dcp_on_event.get_hookimpls())

    def emit(self, event: CheckpointEvent) -> None:
        """Pass an event to the observers of all plug-ins. An observer's error is logged and never raised."""
        if self._diverted is not None:
            self._diverted(event)
            return
        self.discover()
        for implementation in self._manager.hook.dcp_on_event.get_hookimpls():
            _notify(implementation, event)

    def divert_events(self, to: Callable[[CheckpointEvent], object] | None) -> None:
        """Make `emit` call the function `to` instead of the observers in this process; None restores the observers.

        A worker process that saves for a trainer sends its events to the trainer in this way, whose observers get them.
        """
        self._diverted = to

    def discover(self) -> None:
        """Read the entry points and import their plug-ins; later calls do nothing."""
        with self._lock:
            if self._discovered:
                return
            # Set first: a plug-in that searches for others while it is imported must not start this again.
            self._discovered = True
            found = [(_info(point), point) for point in importlib.metadata.entry_points(group=self._group)]
            for info, point in sorted(found, key=lambda pair: (pair[0].distribution or "", pair[0].name)):
                self._load(info, point)

    def _load(self, info: PluginInfo, point: importlib.metadata.EntryPoint) -> None:
        try:
            plugin = point.load()
        except Exception as error:  # noqa: BLE001 - a broken plug-in must not stop the others
            self._plugins.append(replace(info, error=_text(error)))
        else:
            self._add(info, plugin)

    def _add(self, info: PluginInfo, plugin: object) -> PluginInfo:
        with self._lock:
            name = _manager_name(info)
            found: list[tuple[str, str, Any]] = []
            try:
                self._manager.register(plugin, name=name)
                self._manager.check_pending()
                found = list(self._offered(name))
            except Exception as error:  # noqa: BLE001
                info = replace(info, error=_text(error), hooks=self._hooks(plugin))
                if self._manager.has_plugin(name):
                    self._manager.unregister(name=name)
            else:
                tables = {table: tuple(key for where, key, _ in found if where == table) for table, _, _ in found}
                info = replace(info, offers=tables, hooks=self._hooks(plugin))
            self._plugins.append(info)
            for table, key, value in found:
                self._offers[table].setdefault(key, []).append((value, info))
            return info

    def _offered(self, name: str) -> Iterator[tuple[str, str, Any]]:
        """Yield table, name and value of everything that one plug-in offers. Raises its hooks' errors."""
        for table, kind in TABLES.items():
            hook = f"{_REGISTERS}{table}"
            for implementation in getattr(self._manager.hook, hook).get_hookimpls():
                if implementation.plugin_name == name:
                    yield from ((table, key, value) for key, value in kind.pairs(hook, implementation.function()))

    def _hooks(self, plugin: object) -> tuple[str, ...]:
        """Return the hooks that a plug-in implements, unknown ones included."""
        return tuple(caller.name for caller in self._manager.get_hookcallers(plugin) or ())


def _notify(implementation: pluggy.HookImpl, event: CheckpointEvent) -> None:
    try:
        implementation.function(*[event] * len(implementation.argnames))
    except Exception:  # noqa: BLE001 - an observer must never fail a save
        logger.warning("the observer of plugin %r failed", implementation.plugin_name, exc_info=True)


def _info(point: importlib.metadata.EntryPoint) -> PluginInfo:
    distribution = None if point.dist is None else _name_and_version(point.dist)
    return PluginInfo(point.name, distribution, module=point.value)


def _name_and_version(distribution: importlib.metadata.Distribution) -> str:
    # `name` and `version` parse all of the metadata, the README in it included, once each.
    head = (distribution.read_text("METADATA") or "").partition("\n\n")[0]
    found = dict(line.split(": ", 1) for line in head.splitlines() if line.startswith(("Name: ", "Version: ")))
    return f"{found.get('Name') or distribution.name} {found.get('Version') or distribution.version}"


def _manager_name(info: PluginInfo) -> str:
    return f"{info.distribution or ''}:{info.name}"


def resolve(path: str, info: PluginInfo, *, errors: ErrorTypes = ERROR_TYPES) -> Any:
    """Import the `module:attribute` in `path` and return the attribute.

    Raises:
        PluginLoadError: The import fails; the message names the plug-in `info`.
    """
    module, _, attribute = path.partition(":")
    try:
        value: Any = importlib.import_module(module)
        for name in attribute.split("."):
            value = getattr(value, name)
    except Exception as error:
        raise errors.load(f"{info} names {path}, which cannot be imported: {_text(error)}") from error
    return value


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


installed = PluginRegistry()
"""The registry of the plug-ins that are installed for this process. Entry points are read at the first search."""
