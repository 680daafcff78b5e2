"""The file `run.tiers.toml`, which describes the tiers of a run to other processes: promoters and the command."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dcp_io import STALE_AFTER_SECONDS, parse_policy, policy_text
from dcp_tiers.errors import TiersError
from dcp_tiers.tier import Tier

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["DESCRIPTION", "Description", "check_owner", "decode_tiers", "encode_tiers"]

DESCRIPTION = "run.tiers.toml"
"""Name of the file in the folder of each tier."""
_VERSION = 1
_KEYS = {"root", "keep", "rate_bytes_per_second", "max_bytes", "when_full", "per_host"}


@dataclass(frozen=True, slots=True)
class Description:
    """What the file says: the arguments of `Tiers`."""

    tiers: Sequence[Tier]
    """The tiers, nearest first."""
    folder_prefix: str
    """Prefix of checkpoint folder names."""
    stale_after_seconds: float = STALE_AFTER_SECONDS
    """Age at which markers and leases of other hosts count as dead."""


def encode_tiers(described: Description) -> bytes:
    """Return a description as TOML.

    Raises:
        ValueError: A policy is of a class of your own.
    """
    lines = [
        "# Tiers of a training run's checkpoints, nearest first: for `python -m dcp_tiers.promote` and tools.",
        f"version = {_VERSION}",
        f"folder_prefix = {_string(described.folder_prefix)}",
    ]
    if described.stale_after_seconds != STALE_AFTER_SECONDS:
        lines.append(f"stale_after_seconds = {float(described.stale_after_seconds)!r}")
    for tier in described.tiers:
        lines += [
            "",
            "[[tiers]]",
            f"root = {_string(os.fspath(tier.root))}",
            f"keep = {_string(policy_text(tier.keep))}",
        ]
        if tier.rate_bytes_per_second is not None:
            lines.append(f"rate_bytes_per_second = {float(tier.rate_bytes_per_second)!r}")
        if tier.max_bytes is not None:
            lines += [f"max_bytes = {int(tier.max_bytes)}", f"when_full = {_string(tier.when_full)}"]
        if tier.per_host:
            lines.append("per_host = true")
    return ("\n".join(lines) + "\n").encode()


def decode_tiers(data: bytes, file: str) -> Description:
    """Return what a file describes.

    Args:
        data: Contents of the file.
        file: Its path or URI, for messages.

    Raises:
        TiersError: The contents are not a description, or of a later version; the message names file and key.
    """
    try:
        values: dict[str, Any] = tomllib.loads(data.decode())
        version = values["version"]
        if version == _VERSION:
            stale = float(values.get("stale_after_seconds", STALE_AFTER_SECONDS))
            return Description([_tier(one) for one in values["tiers"]], str(values["folder_prefix"]), stale)
    except KeyError as error:
        raise TiersError(f"{file}: the key {error} is missing; write the file anew with Tiers.write()") from error
    except (ValueError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise TiersError(f"{file} does not describe tiers: {error}; write it anew with Tiers.write()") from error
    raise TiersError(f"{file}: version {version!r} is not {_VERSION}; use the dcp-tiers that wrote it")


def check_owner(path: str) -> None:
    """Raise TiersError if a file belongs neither to the user of this process nor to root."""
    owner = os.stat(path).st_uid
    if owner not in (os.geteuid(), 0):
        raise TiersError(
            f"{path} belongs to another user (uid {owner}), and checkpoints would be written and removed where it "
            "says: read it, and give the command a copy that is yours"
        )


def _tier(values: dict[str, Any]) -> Tier:
    if unknown := values.keys() - _KEYS:
        raise ValueError(f"unknown key {min(unknown)!r}; known are {', '.join(sorted(_KEYS))}")
    optional = {key: values[key] for key in _KEYS - {"root", "keep"} if key in values}
    return Tier(str(values["root"]), parse_policy(values["keep"]), **optional)


def _string(text: str) -> str:
    # A string of JSON is one of TOML, except for DEL.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
