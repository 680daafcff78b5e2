"""Registry of plug-ins, their discovery by entry point, and the observers of events.

Each kind of entry (storages, transforms, …) has a table: name → a plug-in's offer. A broken plug-in's error is raised
only if no working plug-in offers the requested name.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import pluggy

from dcp_base.errors import DcpError, PluginLoadError, PluginNotFoundError
from dcp_base.hookspecs import (
    PROJECT_NAME,
    CheckpointEvent,
    HookSpecs,
    StorageBackendSpec,
    StoreSpec,
)
from dcp_base.imports import SOURCE, import_part, resolve
from dcp_base.logs import logger
from dcp_base.schemes import package_for

ENTRY_POINT_GROUP = "dcp"
_Pairs = list[tuple[str, Any]]


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """Description of a working or broken plug-in.

    Args:
        name: Name of the entry point.
        distribution: Name and version of the distribution; None for `register`.
        error: Why the plug-in is unusable, or None.
        offers: Table (`storage`, `transforms`, …) → offered names.
        module: Module of the entry point; None for `register`.
        hooks: Implemented hooks; empty if the module cannot be imported.
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
    """Registry of the plug-ins of entry points (of `group`) and `register`. Thread-safe.

    ```python
    from dcp_base import PluginRegistry

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
        self._subscribed: tuple[tuple[str, Callable[[CheckpointEvent], object]], ...] = ()
        self._discovered = False
        self._diverted: Callable[[CheckpointEvent], object] | None = None

    def register(self, plugin: object, name: str) -> None:
        """Register a plug-in object. Raises PluginLoadError if a hook is invalid or fails."""
        self.discover()
        with self._lock:
            info = self._add(PluginInfo(name), plugin)
            if info.error is not None:
                self._plugins.remove(info)
                raise PluginLoadError(f"plugin {name!r} is not valid: {info.error}")

    def unregister(self, name: str) -> None:
        """Remove a plug-in that `register` added, or raise PluginNotFoundError."""
        with self._lock:
            info = next((info for info in self._plugins if info.name == name and info.distribution is None), None)
            if info is None:
                raise PluginNotFoundError(f"no plugin was registered by hand under the name {name!r}")
            self._plugins.remove(info)
            self._manager.unregister(name=f":{name}")
            for names in self._offers.values():
                for offered in names.values():
                    offered[:] = [pair for pair in offered if pair[1] is not info]
            self._subscribe()

    def list(self) -> tuple[PluginInfo, ...]:
        """Return all plug-ins, including broken ones, in the order of discovery."""
        self.discover()
        return tuple(self._plugins)

    def names(self, table: str) -> tuple[str, ...]:
        """Return the sorted names in a table, such as schemes in `storage`."""
        self.discover()
        return tuple(sorted(name for name, offered in self._offers[table].items() if offered))

    def find(self, table: str, name: str) -> tuple[Any, PluginInfo]:
        """Return the entry (a record or a `module:attribute`) of a name in a table, and its plug-in.

        Raises:
            PluginNotFoundError: No plug-in offers the name; the message names the package to install.
            PluginLoadError: No plug-in offers the name, but a broken plug-in may.
            DcpError: Two plug-ins offer the name.
        """
        self.discover()
        offered = self._offers[table].get(name, [])
        if len(offered) > 1:
            offered = [pair for pair in offered if not getattr(pair[0], "fallback", False)] or offered
        what = TABLES[table].entry.format(name=name)
        if len(offered) > 1:
            raise DcpError(
                f"{what} is offered by {' and by '.join(str(info) for _, info in offered)}; uninstall one of them"
            )
        if offered:
            return offered[0]
        broken = [info for info in self._plugins if info.error is not None]
        if broken:
            reasons = "; ".join(f"{info}: {info.error}" for info in broken)
            raise PluginLoadError(f"no working plugin offers {what}. Broken plugins that may offer it: {reasons}")
        known = ", ".join(self.names(table)) or "nothing"
        remedy = TABLES[table].remedy.format(package=package_for(name))
        raise PluginNotFoundError(f"no installed plugin offers {what} (installed: {known}); {remedy}")

    def offered(self, table: str, name: str) -> tuple[tuple[Any, PluginInfo], ...]:
        """Return (entry, plug-in) pairs for a name, in the order of discovery."""
        self.discover()
        return tuple(self._offers[table].get(name, ()))

    def factory(self, table: str, name: str) -> Any:
        """Import and return the factory of a name in a table; raises like `find`."""
        path, info = self.find(table, name)
        return resolve(path, info)

    def import_offers(self, info: PluginInfo) -> None:
        """Import every `module:attribute` of a plug-in, as a check, or raise PluginLoadError."""
        for path in self.modules_of(info):
            resolve(path, info)

    def modules_of(self, info: PluginInfo) -> tuple[str, ...]:
        """Return every `module:attribute` of a plug-in."""
        return tuple(
            path
            for table, names in info.offers.items()
            for name in names
            for entry, owner in self._offers[table][name]
            if owner is info
            for path in TABLES[table].paths(entry)
        )

    @property
    def observed(self) -> bool:
        """Whether a plug-in, the progress bar, or `divert_events`' function observes events."""
        return self._diverted is not None or bool(self._observers())

    def emit(self, event: CheckpointEvent) -> None:
        """Pass an event to all observers, logging their errors."""
        if self._diverted is not None:
            self._diverted(event)
            return
        for name, observe in self._observers():
            try:
                observe(event)
            except Exception:  # noqa: BLE001 - an observer must never fail a save
                logger.warning("the observer of plugin %r failed", name, exc_info=True)

    def divert_events(self, to: Callable[[CheckpointEvent], object] | None) -> None:
        """Make `emit` call `to` instead of this process's observers, as a worker process does; None restores them."""
        self._diverted = to

    def _observers(self) -> Sequence[tuple[str, Callable[[CheckpointEvent], object]]]:
        self.discover()
        bar = None if find_screen() is None else _bar()
        return self._subscribed if bar is None else (*self._subscribed, ("dcp-inspect", bar))

    def discover(self) -> None:
        """Read the entry points and import their plug-ins, once."""
        with self._lock:
            if self._discovered:
                return
            # Set first, because a plug-in may search for others during its import.
            self._discovered = True
            found = [(_info(point), point) for point in importlib.metadata.entry_points(group=self._group)]
            for info, point in sorted(found, key=lambda pair: (pair[0].distribution or "", pair[0].name)):
                try:
                    plugin = point.load()
                except Exception as error:  # noqa: BLE001 - a broken plug-in must not stop the others
                    self._plugins.append(replace(info, error=_text(error)))
                else:
                    self._add(info, plugin)

    def _add(self, info: PluginInfo, plugin: object) -> PluginInfo:
        name, problem = f"{info.distribution or ''}:{info.name}", None
        found: dict[str, _Pairs] = {}
        with self._lock:
            try:
                self._manager.register(plugin, name=name)
                self._manager.check_pending()
                found = self._asked(plugin)
            except Exception as error:  # noqa: BLE001
                problem = _text(error)
            hooks = [caller.name for caller in self._manager.get_hookcallers(plugin) or ()]
            if problem is not None and self._manager.has_plugin(name):
                self._manager.unregister(name=name)
            offers = {table: tuple([key for key, _ in pairs]) for table, pairs in found.items()}
            info = replace(info, error=problem, offers=offers, hooks=tuple(hooks))
            self._plugins.append(info)
            for table, pairs in found.items():
                for key, value in pairs:
                    self._offers[table].setdefault(key, []).append((value, info))
            self._subscribe()
            return info

    def _asked(self, plugin: object) -> dict[str, _Pairs]:
        callers = {caller.name: caller for caller in self._manager.get_hookcallers(plugin) or ()}
        found: dict[str, _Pairs] = {}
        for table, kind in TABLES.items():
            hook = f"dcp_register_{table}"
            if hook in callers:
                for implementation in callers[hook].get_hookimpls():
                    if implementation.plugin is plugin and (pairs := kind.pairs(hook, implementation.function())):
                        found[table] = [*found.get(table, ()), *pairs]
        return found

    def _subscribe(self) -> None:
        observers = self._manager.hook.dcp_on_event.get_hookimpls()
        self._subscribed = tuple((each.plugin_name, _caller(each)) for each in observers)


def _caller(implementation: pluggy.HookImpl) -> Callable[[CheckpointEvent], object]:
    return lambda event: implementation.function(*[event] * len(implementation.argnames))


def _info(point: importlib.metadata.EntryPoint) -> PluginInfo:
    if point.dist is None:
        return PluginInfo(point.name, module=point.value)
    # `name` and `version` of a distribution each parse the whole metadata, including the README.
    head = (point.dist.read_text("METADATA") or "").partition("\n\n")[0]
    found = dict([line.split(": ", 1) for line in head.splitlines() if line.startswith(("Name: ", "Version: "))])
    owner = f"{found.get('Name') or point.dist.name} {found.get('Version') or point.dist.version}"
    return PluginInfo(point.name, owner, module=point.value)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


@dataclass(frozen=True, slots=True)
class Table:
    """One table of the registry."""

    entry: str
    remedy: str
    record: type[StorageBackendSpec | StoreSpec] | None = None
    factories: tuple[str, ...] = ()

    def pairs(self, hook: str, answer: Any) -> list[tuple[str, Any]]:
        """Return a hook's (name, entry) pairs. Raises TypeError or ValueError if they are invalid."""
        pairs: _Pairs
        if self.record is not None:
            specs = list(answer)
            pairs = [(spec.scheme, spec) for spec in specs if isinstance(spec, self.record)]
            if len(pairs) < len(specs):
                raise TypeError(f"{hook} must return {self.record.__name__} records, not {specs!r}")
        else:
            named = [*answer.items()] if isinstance(answer, Mapping) else [(None, None)]
            texts = [(name, path) for name, path in named if isinstance(name, str) and isinstance(path, str)]
            pairs = [(name, path) for name, path in texts if path.count(":") == 1]
            if len(pairs) < len(named):
                raise TypeError(f"{hook} must return a mapping of name to 'module:attribute', not {answer!r}")
        if len({name for name, _ in pairs}) < len(pairs):
            raise ValueError(f"{hook} returns one name twice: {[name for name, _ in pairs]}")
        return pairs

    def paths(self, entry: Any) -> Iterator[str]:
        """Yield every `module:attribute` in an entry."""
        if self.record is None:
            yield entry
        yield from (getattr(entry, each) for each in self.factories)


TABLES: Mapping[str, Table] = MappingProxyType(
    {
        "storage": Table(
            "a storage for {name}:// ids",
            f"install {{package}}{SOURCE}, or pass a storage reader or writer",
            StorageBackendSpec,
            ("reader", "writer"),
        ),
        "stores": Table("a store for {name}:// places", f"install {{package}}{SOURCE}", StoreSpec, ("opener",)),
        "transforms": Table(
            "the transform {name!r}",
            f"install the package that wrote the checkpoint; for zstd and float planes, install dcp-transforms{SOURCE}",
        ),
        "state_adapters": Table("the adapter {name!r}", f"install dcp-state{SOURCE}"),
        "converters": Table("the converter {name!r}", f"install dcp-format{SOURCE}"),
    }
)
"""By name. The hook is `dcp_register_` with the table's name."""


installed = PluginRegistry()
"""This process's registry; entry points are read at the first search."""


_OFF = ("0", "off", "no", "false")


def find_screen() -> str | None:
    """Return `terminal` (on stderr) or `notebook`; None without a user, or if `DCP_PROGRESS=0`."""
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    in_notebook = get_shell is not None and type(get_shell()).__name__ == "ZMQInteractiveShell"
    screen = "notebook" if in_notebook else "terminal"
    try:
        # First, because most jobs have no terminal, and this is the cheapest question.
        if screen == "terminal" and not sys.stderr.isatty():
            return None
    except (AttributeError, ValueError):  # missing, replaced or closed stream
        return None
    is_off = os.environ.get("DCP_PROGRESS", "").lower() in _OFF
    return None if is_off or (screen == "terminal" and os.environ.get("TERM") == "dumb") else screen


@functools.cache
def _bar() -> Callable[[CheckpointEvent], object] | None:
    try:
        found: Callable[[CheckpointEvent], object] = import_part("bar")
    except PluginNotFoundError:
        return None
    except PluginLoadError as error:  # a save must not fail for it
        logger.warning("no progress bar is shown: %s", error)
        return None
    return found
