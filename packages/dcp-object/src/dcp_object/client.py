"""Client of one container: retries requests within a deadline; errors name the request, without credentials.

obstore itself retries failed connections and 5xx responses. This module handles failures that obstore cannot
recognise: truncated responses, and lost responses to writes.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import obstore
from obstore import exceptions
from obstore.store import from_url

from dcp_base.errors import InvalidPlaceError
from dcp_io import StorageError
from dcp_io.recently_used import RecentlyUsed
from dcp_io.stores.stream_files import Attempts
from dcp_object.options import Options

T = TypeVar("T")

# Beyond the client's own retries: for what only the caller can see to be wrong.
_ATTEMPTS = 4
_MAX_CLIENTS = 16
_ENVIRONMENT = ("AWS_", "AZURE_", "GOOGLE_", "GCP_", "HTTP", "NO_PROXY")

_CONDITIONS = (exceptions.AlreadyExistsError, exceptions.PreconditionError, exceptions.NotModifiedError)
_REFUSALS = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)

_clients: RecentlyUsed[tuple[object, ...], Client] = RecentlyUsed(_MAX_CLIENTS)
_clients_lock = threading.Lock()


class Client:
    """Client of one container (bucket) of an object store. Thread-safe.

    `root` is the container's URI. No request is retried after `retry_timeout_seconds`. Conditional requests go to
    `unrepeated`, a store without own retries, at most `attempts` times: a repeated one may be refused only because the
    first attempt succeeded and its answer was lost.
    """

    def __init__(
        self, native: Any, root: str, *, retry_timeout_seconds: float, unrepeated: Any = None, attempts: int = 7
    ) -> None:
        self.native = native
        self.root = root
        self.attempts = attempts
        self._unrepeated = native if unrepeated is None else unrepeated
        self._retry_timeout_seconds = retry_timeout_seconds

    def call(
        self,
        what: str,
        key: str,
        function: Callable[[], T],
        *,
        on_doubt: Callable[[], T | None] | None = None,
        attempts: int = _ATTEMPTS,
    ) -> T:
        """Send a request, retry it after transient errors, and return its result.

        `what` and `key` are for error messages. `on_doubt` is called after a failed attempt, which the service may have
        carried out; it returns the request's result, or None to retry.

        Raises:
            FileNotFoundError: The object does not exist.
            FileExistsError: The object exists, or another process has replaced it since it was opened.
            StorageError: The last attempt failed, or a retry is useless.
        """
        made, found = (
            Attempts(f"{what} {self.root}/{key}", attempts, retry_timeout_seconds=self._retry_timeout_seconds),
            None,
        )
        while True:
            try:
                return function()
            except (FileNotFoundError, StorageError):
                raise
            except _CONDITIONS as error:
                # Of a repeated request this may be the work of its first attempt, whose answer was lost.
                if made.number == 1 or on_doubt is None or (found := on_doubt()) is None:
                    raise self._condition(what, key, error) from None
            except (exceptions.BaseError, OSError) as error:
                if on_doubt is None or isinstance(error, _REFUSALS) or (found := on_doubt()) is None:
                    _wait(made, error)
            if found is not None:
                return found

    def once(self, what: str, key: str, function: Callable[[], T]) -> T:
        """Send a request without retries by this class. Raises StorageError for any failure."""
        made = Attempts(f"{what} {self.root}/{key}", 1)
        try:
            return function()
        except (exceptions.BaseError, OSError) as error:
            raise made.failure(explained(error), _remedy(error)) from None

    def _condition(self, what: str, key: str, error: BaseException) -> FileExistsError:
        if isinstance(error, exceptions.AlreadyExistsError):
            return FileExistsError(f"{self.root}/{key} exists already")
        return FileExistsError(f"{what} {self.root}/{key}: {_redacted(error)}")

    def put(self, key: str, data: bytes, mode: Any) -> None:
        """Put an object by one request, without retries by this class.

        Raises FileNotFoundError if the object to be replaced, StorageError if the container is missing.
        """
        try:
            obstore.put(self._unrepeated, key, data, mode=mode, use_multipart=False)
        except FileNotFoundError as error:
            if isinstance(mode, dict):
                raise
            raise StorageError(
                f"PUT {self.root}/{key}: {_redacted(error)}; check endpoint, region and container"
            ) from None

    def get(self, key: str) -> tuple[bytes, Any]:
        """Get an object's bytes and metadata. Raises ConnectionError if the response is too short."""
        answer = obstore.get(self.native, key)
        meta = answer.meta
        data = bytes(answer.bytes())
        if len(data) != meta["size"]:
            raise ConnectionError(f"{len(data)} of {meta['size']} bytes arrived")
        return data, meta

    def get_range(self, key: str, start: int, stop: int) -> Any:
        """Get bytes [start, stop) as a buffer, shorter if the object ends before."""
        return obstore.get_range(self.native, key, start=start, end=stop)

    def head(self, key: str) -> Any:
        """Return obstore's dict: `size`, `last_modified`, `e_tag` and others."""
        return obstore.head(self.native, key)

    def delete(self, key: str) -> None:
        """Remove an object."""
        obstore.delete(self.native, key)

    def listing(self, prefix: str) -> Any:
        """List a folder's objects as `objects`, and its subfolders as `common_prefixes`."""
        return obstore.list_with_delimiter(self.native, prefix or None)

    def writer(self, key: str, *, part_bytes: int, uploads: int) -> Any:
        """Return obstore's writer for a new multipart upload."""
        return obstore.open_writer(self.native, key, buffer_size=part_bytes, max_concurrency=uploads)


def connect(root: str, options: Options) -> Client:
    """Return a container's client, cached by options and environment variables. Raises ValueError for wrong options."""
    environment = tuple(sorted((k, v) for k, v in os.environ.items() if k.upper().startswith(_ENVIRONMENT)))
    key = (os.getpid(), root, options.identity(), hash(environment))
    with _clients_lock:
        client = _clients.get(key)
        if client is None:
            retries = int(options.retry_config["max_retries"])
            client = Client(
                _native(root, options),
                root,
                retry_timeout_seconds=options.retry_timeout_seconds,
                unrepeated=_native(root, options, max_retries=0),
                attempts=retries + 1,
            )
            _clients.put(key, client)
        return client


def _wait(made: Attempts, error: BaseException) -> None:
    """Wait before the next retry; raise, unchained since its text may contain credentials, if none is left."""
    message = explained(error)
    if _is_permanent(error) or not made.wait(message):
        raise made.failure(message, _remedy(error)) from None


def _native(root: str, options: Options, **retries: int) -> Any:
    retry_config = {**options.retry_config, **retries}
    given: dict[str, Any] = {"client_options": options.client_options, "retry_config": retry_config}
    if options.config:
        given["config"] = options.config
    if options.credential_provider is not None:
        given["credential_provider"] = options.credential_provider
    try:
        return from_url(root, **given)
    except (exceptions.BaseError, ValueError, TypeError) as error:
        names = ", ".join(sorted(options.config)) or "none"
        raise InvalidPlaceError(f"{root} cannot be opened (options given: {names}): {explained(error)}") from None


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


# Path of a cloud's metadata service → what is missing then.
_METADATA_SERVICES = {
    "/latest/api/token": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (profiles in ~/.aws are not read) are",
    "/latest/meta-data/": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (profiles in ~/.aws are not read) are",
    "/computeMetadata/": "GOOGLE_APPLICATION_CREDENTIALS is",
    "/metadata/identity": "AZURE_STORAGE_ACCOUNT_KEY, or another credential of the account, is",
}
_NO_ACCOUNT = "Account must be specified"


def _redacted(error: BaseException) -> str:
    """Return an error's message without URL parameters, user names and debug output."""
    text = " ".join(str(error).partition(_DUMP)[0].split())
    return _USER.sub("://…@", _QUERY.sub("?…", text))


def explained(error: BaseException) -> str:
    """Return `_redacted`, after a hint if the client lacks an account, or asked a cloud machine for credentials."""
    text = _redacted(error)
    if _NO_ACCOUNT in text:
        return f"no credentials found: AZURE_STORAGE_ACCOUNT_NAME is not set ({text})"
    missing = next((what for path, what in _METADATA_SERVICES.items() if path in text), None)
    if missing is None:
        return text
    return f"no credentials found: {missing} not set, and no role of this machine answered ({text})"


def _is_permanent(error: BaseException) -> bool:
    return isinstance(error, _PERMANENT) or _CLIENT_STATUS.search(_redacted(error)) is not None


def _remedy(error: BaseException) -> str:
    refused = isinstance(error, (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError))
    if refused or _REFUSED_STATUS.search(_redacted(error)) is not None:
        return "check the credentials and what they may do with this container"
    if _is_permanent(error):
        return "check endpoint, region and container"
    return "check the connection and the service, or allow more with retry_config"
