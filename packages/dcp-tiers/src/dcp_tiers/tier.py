"""`Tier`: one storage of a training run's checkpoints, with its policies, and the file `run.tiers.toml`."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal, get_args

from dcp_base import DcpError
from dcp_base.schemes import file_path, scheme_of, without_end_slash
from dcp_io import STALE_AFTER_SECONDS, HostStore, KeepAll, KeepPolicy, LocalStore, Store
from dcp_io.roots.copy_notes import HostCopies
from dcp_io.stores.host_store import HostFolder


class TiersError(DcpError, ValueError):
    """The description of tiers is wrong: none, a duplicate, or an unreadable file."""


WhenFull = Literal["wait", "drop"]


def is_number(value: object) -> bool:
    """Return whether a value is a real number, not a boolean."""
    return isinstance(value, Real) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Tier:
    """One storage of a run's checkpoints, under the same path or URI for all ranks and promoters.

    Args:
        root: Path of a directory, or a URI of an installed storage. Relative paths are resolved immediately.
        keep: Policy that selects the checkpoints to promote to this tier and to keep in it.
        rate_bytes_per_second: Limit for a promoter's writes to this tier; None for no limit. Not for the first tier.
        max_bytes: Budget for all checkpoints in the tier; None for no limit. The oldest checkpoints that no further
            tier needs are removed first, even if `keep` selects them; the newest complete one is never removed.
        when_full: Policy for a tier full of checkpoints that further tiers still need. `wait`: a save (in a further
            tier, a promotion) waits until enough of them have arrived. `drop`: the oldest are removed, with an event
            and a warning, and are lost unless another tier has them.
        per_host: Whether each host has its own directory at this path, such as its disk, with the files of its ranks.
            True for URIs of per-host stores, such as `host:///path`. Only for the first tier.
        copies: Way to copy each host's part to other hosts, such as `dcp_memory.partner()`, which a manager uses after
            each save. Only for a per-host tier. Not part of `run.tiers.toml`.

    Raises:
        TiersError: The rate or the budget is not positive, or `when_full` or `copies` is not valid.
        InvalidPlaceError: The root is empty, or looks like a URI that lost a slash.

    Example:
        ```python
        from dcp_io import KeepEvery, KeepLast
        from dcp_tiers import Tier

        tier = Tier("s3://bucket/run", keep=KeepLast(10) | KeepEvery(1000), rate_bytes_per_second=500e6)
        ```
    """

    root: str | os.PathLike[str]
    keep: KeepPolicy = field(default_factory=KeepAll)
    rate_bytes_per_second: float | None = None
    max_bytes: int | None = None
    when_full: WhenFull = "wait"
    per_host: bool = field(default=False, kw_only=True)
    copies: HostCopies | None = field(default=None, kw_only=True, compare=False)

    def __post_init__(self) -> None:
        root = _absolute(self.root)
        object.__setattr__(self, "root", without_end_slash(root))
        if not isinstance(self.keep, KeepPolicy):
            raise TiersError(f"tier {root}: keep is {self.keep!r}; give a policy, such as KeepLast(2)")
        rate, limit = self.rate_bytes_per_second, self.max_bytes
        if rate is not None and not (is_number(rate) and 1 <= rate <= sys.float_info.max):
            raise TiersError(f"tier {root}: rate_bytes_per_second is {rate!r}; it must be a number of at least 1")
        if limit is not None and not (is_number(limit) and limit >= 1 and limit == limit // 1):
            raise TiersError(f"tier {root}: max_bytes is {limit!r}; it must be a positive whole number")
        object.__setattr__(self, "max_bytes", None if limit is None else int(limit))
        if not isinstance(self.per_host, bool):
            raise TiersError(f"tier {root}: per_host is {self.per_host!r}; it must be True or False")
        if not (self.copies is None or isinstance(self.copies, HostCopies)):
            raise TiersError(f"tier {root}: copies is {self.copies!r}; give one such as dcp_memory.partner()")
        if self.when_full not in get_args(WhenFull):
            raise TiersError(f"tier {root}: when_full is {self.when_full!r}; choose 'wait' or 'drop'")

    @property
    def url(self) -> str:
        """Absolute path or URI of the tier's directory."""
        root = os.fspath(self.root)
        return HostFolder(root).url if self.per_host and scheme_of(root) == "file" else root


def _absolute(root: str | os.PathLike[str]) -> str:
    """Return the absolute path or URI. Raises TiersError if promoters could not read it."""
    text = os.fspath(root)
    if isinstance(text, bytes):
        raise TiersError(f"tier {text!r}: give the root as text, such as {os.fsdecode(text)!r}")
    if scheme_of(text) == "file":
        text = os.path.abspath(file_path(text))
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TiersError(f"tier {text!a}: run.tiers.toml cannot name a path that is not UTF-8") from error
    return text


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


DESCRIPTION = "run.tiers.toml"
"""File name in each tier."""
_VERSION = 1
_RUN_KEYS = {"version", "folder_prefix", "stale_after_seconds", "tiers"}
_KEYS = {"root", "keep", "rate_bytes_per_second", "max_bytes", "when_full", "per_host"}


@dataclass(frozen=True, slots=True)
class Description:
    """The arguments of `Tiers`."""

    tiers: Sequence[Tier]
    folder_prefix: str
    stale_after_seconds: float = STALE_AFTER_SECONDS


def encode_tiers(described: Description) -> bytes:
    """Return TOML. Raises ValueError for a user-defined policy."""
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
            f"keep = {_string(tier.keep.text())}",
        ]
        if tier.rate_bytes_per_second is not None:
            lines.append(f"rate_bytes_per_second = {float(tier.rate_bytes_per_second)!r}")
        if tier.max_bytes is not None:
            lines += [f"max_bytes = {int(tier.max_bytes)}", f"when_full = {_string(tier.when_full)}"]
        if tier.per_host:
            lines.append("per_host = true")
    return ("\n".join(lines) + "\n").encode()


def decode_tiers(data: bytes, file: str) -> Description:
    """Return a description. Raises TiersError, which names file and key."""
    try:
        values: dict[str, Any] = tomllib.loads(data.decode())
        version = values["version"]
        if version == _VERSION:
            _check_keys(values, _RUN_KEYS)
            stale = float(values.get("stale_after_seconds", STALE_AFTER_SECONDS))
            return Description([_tier(one) for one in values["tiers"]], str(values["folder_prefix"]), stale)
    except KeyError as error:
        raise TiersError(f"{file}: the key {error} is missing; write the file anew with Tiers.write()") from error
    except (ValueError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise TiersError(f"{file} does not describe tiers: {error}; write it anew with Tiers.write()") from error
    raise TiersError(f"{file}: version {version!r} is not {_VERSION}; use the dcp-tiers that wrote it")


def doubt_of(store: Store, name: str, data: bytes) -> str | None:
    """Return why paths in the bytes of a file need confirmation; None if they are trusted.

    A local file is trusted if this user or root owns it and other users cannot write to it. Per-host stores belong to
    their user. A file in a bucket has no owner.
    """
    file = f"{store.url}/{name}"
    if isinstance(store, LocalStore):
        with open(os.path.join(store.path, name), "rb") as opened:
            status, now = os.fstat(opened.fileno()), opened.read()
        if now != data:
            return f"{file} was replaced while it was read"
        if status.st_uid not in (os.geteuid(), 0):
            return f"{file} belongs to another user (uid {status.st_uid})"
        return f"{file} can be written to by everybody" if status.st_mode & stat.S_IWOTH else None
    if isinstance(store, HostStore):
        return None
    return f"{file} may be anybody's who can write there: such a storage names no owner"


def is_same_place(one: Store, other: Store) -> bool:
    """Return whether two stores are the same directory, even by different paths."""
    if isinstance(one, LocalStore) and isinstance(other, LocalStore):
        return os.path.realpath(one.path) == os.path.realpath(other.path) or _is_same_file(one.path, other.path)
    return one.url == other.url


def _is_same_file(one: str, other: str) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samefile(one, other)
    return False


def _tier(values: dict[str, Any]) -> Tier:
    _check_keys(values, _KEYS)
    root = str(values["root"])
    if scheme_of(root) == "file" and not os.path.isabs(file_path(root)):
        raise ValueError(f"the root {root!r} is relative, so it names another directory for each reader")
    optional = {key: values[key] for key in _KEYS - {"root", "keep"} if key in values}
    return Tier(root, KeepPolicy.parse(values["keep"]), **optional)


def _check_keys(values: Mapping[str, Any], known: Collection[str]) -> None:
    if unknown := values.keys() - known:
        raise ValueError(f"unknown key {min(unknown)!r}; known are {', '.join(sorted(known))}")


def _string(text: str) -> str:
    # A string of JSON is one of TOML, except for DEL.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
