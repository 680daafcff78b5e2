"""Errors of the discovery of plug-ins, as a tree of exception classes.

    HookError
    ├── PluginNotFoundError      also LookupError, RuntimeError
    ├── PluginLoadError          also ImportError
    └── DuplicatePluginError     also ValueError

A package whose exceptions have a base class of their own, such as `dcp_core`, derives subclasses from these errors and
passes them as `ErrorTypes`.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ERROR_TYPES", "DuplicatePluginError", "ErrorTypes", "HookError", "PluginLoadError", "PluginNotFoundError"]


class HookError(Exception):
    """Base class of all exceptions that `dcp_hooks` raises on purpose.

    Messages are safe for terminals and logs: unprintable characters in names are shown as escape sequences.
    """

    def __str__(self) -> str:
        return "".join(map(_printable, super().__str__()))


class PluginNotFoundError(HookError, LookupError, RuntimeError):
    """No installed plug-in offers the requested storage, transform, saver or other entry.

    The message names the package to install, where one is known.
    """


class DuplicatePluginError(HookError, ValueError):
    """Two plug-ins offer an entry, such as a storage, under the same name; the message names both."""


class PluginLoadError(HookError, ImportError):
    """An installed plug-in that may be needed cannot be imported, or its hooks are not valid."""


@dataclass(frozen=True, slots=True)
class ErrorTypes:
    """The exception classes that a search for plug-ins raises: those of this module, or subclasses of them.

    For packages whose exceptions have a base class of their own.
    """

    not_found: type[PluginNotFoundError] = PluginNotFoundError
    duplicate: type[DuplicatePluginError] = DuplicatePluginError
    load: type[PluginLoadError] = PluginLoadError


ERROR_TYPES = ErrorTypes()


def _printable(character: str) -> str:
    if character.isprintable() or character in "\n\t":
        return character
    return character.encode("unicode_escape").decode("ascii")
