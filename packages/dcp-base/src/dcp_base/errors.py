"""The base class of all errors of these packages, and the errors of plug-ins and URIs."""

from __future__ import annotations

from dcp_base.escaping import printable


class DcpError(Exception):
    """Base class of the errors of these packages. `printable` escapes the message, for terminals and logs."""

    def __str__(self) -> str:
        return printable(super().__str__(), keep="\n\t")

    def name_place(self, place: str) -> None:
        """Prefix the message with the path or URI of a checkpoint, unless it is there."""
        message = str(self.args[0]) if self.args else ""
        if not message.startswith(f"{place}: "):
            self.args = (f"{place}: {message}", *self.args[1:])


class InvalidPlaceError(DcpError, ValueError):
    """A path or URI is empty, or looks like a mistyped URI, such as `s3:/bucket` with one slash."""


class PluginNotFoundError(DcpError, LookupError, RuntimeError):
    """No installed plug-in offers the requested entry. The message names the package to install, if one is known."""


class PluginLoadError(DcpError, ImportError):
    """An installed plug-in that may be needed cannot be imported, or its hooks are invalid."""
