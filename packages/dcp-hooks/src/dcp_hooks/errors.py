"""Errors of the search for plug-ins.

    HookError
    ├── PluginNotFoundError      also LookupError, RuntimeError
    ├── PluginLoadError          also ImportError
    └── DuplicatePluginError     also ValueError

A package with a root class of its own derives from them and passes its classes as `ErrorTypes`: `dcp_core` does.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ERROR_TYPES", "DuplicatePluginError", "ErrorTypes", "HookError", "PluginLoadError", "PluginNotFoundError"]


class HookError(Exception):
    """Base class of the errors that this package raises on purpose.

    Its message is safe for terminals and logs: unprintable characters in names are shown as escape sequences.
    """

    def __str__(self) -> str:
        return "".join(map(_printable, super().__str__()))


class PluginNotFoundError(HookError, LookupError, RuntimeError):
    """No installed plug-in offers what is needed; the message names the package to install."""


class DuplicatePluginError(HookError, ValueError):
    """Two distributions offer a plug-in under one name."""


class PluginLoadError(HookError, ImportError):
    """A plug-in that is needed is installed, but cannot be imported or is not valid."""


@dataclass(frozen=True, slots=True)
class ErrorTypes:
    """The classes of the errors that a search raises, for packages whose errors have a root class of their own."""

    not_found: type[PluginNotFoundError] = PluginNotFoundError
    duplicate: type[DuplicatePluginError] = DuplicatePluginError
    load: type[PluginLoadError] = PluginLoadError


ERROR_TYPES = ErrorTypes()


def _printable(character: str) -> str:
    if character.isprintable() or character in "\n\t":
        return character
    return character.encode("unicode_escape").decode("ascii")
