"""`Options`: the user's `storage_options`, in obstore's groups and completed by defaults."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

RETRY_TIMEOUT_SECONDS = 180.0
_CLIENT = {"connect_timeout": "5s", "read_timeout": "30s", "timeout": "120s"}
_BACKOFF = {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=5), "base": 2}
_RETRIES = 6


@dataclass(frozen=True, repr=False)
class Options:
    """Options of a client. Never printed, since they may contain credentials."""

    config: dict[str, Any] = field(default_factory=dict)
    client_options: dict[str, Any] = field(default_factory=dict)
    retry_config: dict[str, Any] = field(default_factory=dict)
    credential_provider: Any = None

    @classmethod
    def of(cls, storage_options: Mapping[str, Any] | None, *, plain_http: bool = False) -> Options:
        """Split options into obstore's three named groups, and the options of the service.

        Raises TypeError if a group is not a mapping or a name is not a string, ValueError if an endpoint is not a URL.
        """
        given = dict(storage_options or {})
        if not all(isinstance(name, str) for name in given):
            raise TypeError(f"storage_options must be a mapping from names, got the names {[*given]}")
        groups = {name: given.pop(name, None) or {} for name in ("config", "client_options", "retry_config")}
        for name, group in groups.items():
            if not isinstance(group, Mapping):
                raise TypeError(f"storage_options[{name!r}] must be a mapping, not {type(group).__name__}")
        provider = given.pop("credential_provider", None)
        config = {**groups["config"], **given}
        for name, value in config.items():
            if "endpoint" in name.lower() and "://" not in str(value):
                raise ValueError(f"storage_options[{name!r}] is {value!r}; an endpoint has the form https://host:port")
        allowed = {"allow_http": True} if plain_http or _names_plain_http(config) else {}
        return cls(
            config=config,
            client_options={**_CLIENT, **allowed, **groups["client_options"]},
            retry_config={
                "max_retries": _RETRIES,
                "retry_timeout": timedelta(seconds=RETRY_TIMEOUT_SECONDS),
                "backoff": _BACKOFF,
                **groups["retry_config"],
            },
            credential_provider=provider,
        )

    @property
    def retry_timeout_seconds(self) -> float:
        """Time after which a request is not retried."""
        timeout = self.retry_config["retry_timeout"]
        return timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)

    def identity(self) -> str:
        """Return a cache key, equal for equal options. Contains credentials, and must not be printed."""
        parts = (self.config, self.client_options, self.retry_config, id(self.credential_provider))
        return repr([sorted(part.items()) if isinstance(part, dict) else part for part in parts])

    def __repr__(self) -> str:
        return f"Options({', '.join(sorted((*self.config, *self.client_options)))}: not shown)"


def _names_plain_http(config: Mapping[str, Any]) -> bool:
    """Return whether the endpoint is plain HTTP, which obstore reads only without client options."""
    if os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true", "yes", "on"):
        return True
    given = [value for name, value in config.items() if "endpoint" in name.lower()]
    given += [os.environ.get(name) for name in ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")]
    return any(str(value).lower().startswith("http://") for value in given)
