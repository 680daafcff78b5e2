"""Tables of the plug-in registry, one for each `dcp_register_` hook: checks of entries, texts for error messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from dcp_hooks.hookspecs import CommandSpec, StorageBackendSpec, StoreSpec
from dcp_hooks.install_advice import package_for

__all__ = ["TABLES", "Table"]


@dataclass(frozen=True, slots=True)
class Table:
    """Description of one table of the registry, such as the table of storages.

    Args:
        entry: Text that describes an entry in error messages; `{name}` is replaced by the entry's name.
        remedy: Advice for the error about a missing entry; `{package}` is replaced by the package to install.
        record: Class of the records that the hook returns; None if the hook returns a mapping of name to
            `module:attribute`.
        factories: Names of the record's attributes that hold a `module:attribute`.
        key: Name of the record's attribute that is the entry's name.
    """

    entry: str
    remedy: str
    record: type[StorageBackendSpec | StoreSpec | CommandSpec] | None = None
    factories: tuple[str, ...] = ()
    key: str = "scheme"

    def entry_named(self, name: str) -> str:
        """Return the text that describes the entry with this name in error messages."""
        return self.entry.format(name=name)

    def remedy_for(self, name: str) -> str:
        """Return the advice for an error about a name that no plug-in offers, such as the package to install."""
        return self.remedy.format(package=package_for(name))

    def pairs(self, hook: str, answer: Any) -> list[tuple[str, Any]]:
        """Check the return value of a hook, and return its entries as pairs of name and entry.

        Args:
            hook: Name of the hook, for error messages.
            answer: Return value of the hook.

        Raises:
            TypeError: `answer` is not a sequence of `record` objects, or not a mapping of name to `module:attribute` if
                `record` is None.
            ValueError: `answer` has a name twice.
        """
        pairs = self._mapped(hook, answer) if self.record is None else self._recorded(hook, answer)
        if len({name for name, _ in pairs}) < len(pairs):
            raise ValueError(f"{hook} returns one name twice: {[name for name, _ in pairs]}")
        return pairs

    def paths(self, entry: Any) -> Iterator[str]:
        """Yield every `module:attribute` in an entry."""
        if self.record is None:
            yield entry
        yield from (getattr(entry, each) for each in self.factories)

    def _recorded(self, hook: str, answer: Any) -> list[tuple[str, Any]]:
        specs = list(answer)
        if self.record is not None and not all(isinstance(spec, self.record) for spec in specs):
            raise TypeError(f"{hook} must return {self.record.__name__} records, not {specs!r}")
        return [(getattr(spec, self.key), spec) for spec in specs]

    @staticmethod
    def _mapped(hook: str, answer: Any) -> list[tuple[str, Any]]:
        if not isinstance(answer, Mapping) or not all(
            isinstance(name, str) and isinstance(path, str) and path.count(":") == 1 for name, path in answer.items()
        ):
            raise TypeError(f"{hook} must return a mapping of name to 'module:attribute', not {answer!r}")
        return [*answer.items()]


# Not `pip install NAME`, as long as the index may give that name to somebody else.
_SOURCE = ", from the source of your other dcp packages"

TABLES: Mapping[str, Table] = MappingProxyType(
    {
        "storage": Table(
            "a storage for {name}:// ids",
            f"install {{package}}{_SOURCE}, or pass a storage reader or writer",
            StorageBackendSpec,
            ("reader", "writer"),
        ),
        "stores": Table("a store for {name}:// places", f"install {{package}}{_SOURCE}", StoreSpec, ("opener",)),
        "transforms": Table(
            "the transform {name!r}",
            "install the package that wrote the checkpoint; for zstd and float planes, "
            f"install dcp-transforms{_SOURCE}",
        ),
        "savers": Table("the saver {name!r}", f"install dcp-async{_SOURCE}"),
        "state_adapters": Table("the adapter {name!r}", f"install dcp-state{_SOURCE}"),
        "converters": Table("the converter {name!r}", f"install dcp-format{_SOURCE}"),
        "exchange": Table("the exchange {name!r} for loads", f"install dcp-exchange{_SOURCE}"),
        "commands": Table(
            "the command {name!r}", f"install the package that has it{_SOURCE}", CommandSpec, ("command",), "name"
        ),
        "roots": Table("a root described by {name!r}", f"install dcp-tiers{_SOURCE}"),
        "bridges": Table(
            "a bridge to {name}", f"install dcp-bridge{_SOURCE}, or change the import of its base class to dcp_core"
        ),
    }
)
"""Table name → table. The hook that fills a table is named `dcp_register_` followed by the table's name."""
