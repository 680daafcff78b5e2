"""Conversion of obstore's errors to errors of this project, without credentials in their messages."""

from __future__ import annotations

import re

from obstore import exceptions

from dcp_io import StorageError

__all__ = ["ChangedError", "is_permanent", "redacted", "remedy"]

# The client's messages go on with a dump of its internal state.
_DUMP = "\n\nDebug source:"
_QUERY = re.compile(r"\?[^\s\"'>)]*")
_USER = re.compile(r"://[^/\s@]+@")
_PERMANENT = (
    exceptions.InvalidPathError,
    exceptions.NotSupportedError,
    exceptions.PermissionDeniedError,
    exceptions.UnauthenticatedError,
    exceptions.UnknownConfigurationKeyError,
)
# What a server says to a request that will not become right by being repeated.
_CLIENT_STATUS = re.compile(r"\b(40[0-7]|41[0-7]|42[0-8]) [A-Z]|status: (40|41|42)\d")
# The client has a class for it in most requests, and not in listings.
_REFUSED_STATUS = re.compile(r"\b40[13] [A-Z]|status: 40[13]\b")


class ChangedError(StorageError):
    """Another process has replaced the object since it was opened."""


def redacted(error: BaseException) -> str:
    """Return the message of an obstore error without URL parameters, user names and debug output."""
    text = " ".join(str(error).partition(_DUMP)[0].split())
    return _USER.sub("://…@", _QUERY.sub("?…", text))


def is_permanent(error: BaseException) -> bool:
    """Whether an error is permanent, so retrying the request is useless."""
    return isinstance(error, _PERMANENT) or _CLIENT_STATUS.search(redacted(error)) is not None


def remedy(error: BaseException) -> str:
    """Return the remedy for a failed request, as a clause for the error message."""
    refused = isinstance(error, (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError))
    if refused or _REFUSED_STATUS.search(redacted(error)) is not None:
        return "check the credentials and what they may do with this container"
    if is_permanent(error):
        return "check endpoint, region and container"
    return "check the connection and the service, or allow more with retry_config"
