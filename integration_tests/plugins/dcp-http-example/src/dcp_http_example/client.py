"""Requests to the server: one connection each, errors as OSError that names what was asked for."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, urlencode

from dcp_http_example.address import Address

__all__ = ["Client", "naming"]

_TIMEOUT_SECONDS = 60.0


class Client:
    """Speaks to the server of an address. May be used by several threads."""

    def __init__(self, address: Address) -> None:
        self._address = address

    def connect(self) -> http.client.HTTPConnection:
        """A new connection, which the caller closes."""
        return http.client.HTTPConnection(self._address.host.strip("[]"), self._address.port, timeout=_TIMEOUT_SECONDS)

    def target(self, name: str) -> str:
        """The path of an object, as it stands in a request."""
        return quote(f"/{self._address.folder}/{name}")

    @contextlib.contextmanager
    def ask(
        self, method: str, name: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """The response to a request about an object, to be read within the block.

        Raises:
            ConnectionError: The server cannot be reached or does not speak our language; names the object.
            OSError: It answered with an error of its own.
        """
        with naming(f"{method} {self._address.url}/{name}"), contextlib.closing(self.connect()) as connection:
            connection.request(method, self.target(name), body, dict(headers or {}))
            with connection.getresponse() as response:
                if response.status >= 500:
                    raise OSError(f"the server answered {response.status} {response.reason}")
                yield response

    def page(self, after: str) -> tuple[list[dict[str, Any]], bool]:
        """The next objects of the folder behind a path, and whether more follow."""
        prefix = f"{self._address.folder}/"
        with naming(f"list {self._address.url}"), contextlib.closing(self.connect()) as connection:
            connection.request("GET", f"/?{urlencode({'prefix': prefix, 'after': after or prefix})}")
            with connection.getresponse() as response:
                if response.status != http.client.OK:
                    raise OSError(f"the server answered {response.status} {response.reason}")
                answer = json.loads(response.read())
        return answer["objects"], answer["more"]


@contextlib.contextmanager
def naming(what: str) -> Iterator[None]:
    """Let errors of the connection say what was being done."""
    try:
        yield
    except http.client.HTTPException as error:
        raise ConnectionError(f"{what}: {type(error).__name__}: {error}") from error
    except ConnectionError as error:
        raise type(error)(f"{what}: {error}") from error
    except TimeoutError as error:
        raise TimeoutError(f"{what}: no answer within {_TIMEOUT_SECONDS:g} s") from error
