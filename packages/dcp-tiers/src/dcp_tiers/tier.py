"""`Tier`: one storage of a training run's checkpoints, with its policies. Accesses no storage."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from numbers import Real
from typing import Literal, get_args

from dcp_io import HostCopies, KeepAll, KeepPolicy, host_uri, scheme_of
from dcp_manifest import file_path, without_end_slash
from dcp_tiers.errors import TiersError

__all__ = ["Tier", "WhenFull", "is_number"]

WhenFull = Literal["wait", "drop"]


def is_number(value: object) -> bool:
    """Whether a value is a real number, and not a boolean."""
    return isinstance(value, Real) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Tier:
    """One storage of a run's checkpoints, under the same path or URI for all ranks and promoters.

    Args:
        root: Path of a folder, or a URI that an installed storage handles. A relative path is resolved at once.
        keep: Policy that selects the checkpoints to keep in this tier; those that it selects are promoted to it.
        rate_bytes_per_second: Limit of the rate at which a promoter writes to this tier; None for no limit. Not for the
            first tier, to which nothing is promoted.
        max_bytes: Budget of the tier: what its checkpoints may take together; None for no limit. Checkpoints that no
            further tier must still get are removed first, the oldest first, even if `keep` selects them; the newest
            complete one is never removed.
        when_full: Choice for a tier that is full of checkpoints that further tiers must still get. `wait`: a save (in a
            further tier, a promotion) waits until enough of them have arrived. `drop`: the oldest are removed, with an
            event and a warning, and are lost unless another tier has them.
        per_host: Whether each host has a folder of its own at this path, such as its disk: the folder has the files of
            its ranks. True for the URI of a store of each host, too, such as `host:///path`. Only for the first tier.
        copies: Copies of each host's part on other hosts, such as `dcp_memory.partner()`, which a manager makes after
            each save; None for none. Only for a tier of each host. Not part of `run.tiers.toml`.

    Raises:
        TiersError: The rate or the budget is not positive, `when_full` is another word, or `copies` no way to copy.
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
        """The absolute path, or the URI, of the tier's folder."""
        root = os.fspath(self.root)
        return host_uri(root) if self.per_host and scheme_of(root) == "file" else root


def _absolute(root: str | os.PathLike[str]) -> str:
    """Return the absolute path, or the URI; raises TiersError if promoters could not read its name."""
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
