"""`Tier`: one storage of a training run's checkpoints, with its policies. Accesses no storage."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from dcp_io import KeepAll, KeepPolicy, scheme_of
from dcp_manifest import file_path
from dcp_tiers.errors import TiersError

__all__ = ["Tier"]


@dataclass(frozen=True, slots=True)
class Tier:
    """One storage of a run's checkpoints, which all ranks and promoters see under the same path or URI.

    Args:
        root: Path of a folder, or a URI that an installed storage handles. A relative path is resolved at once.
        keep: Policy that selects the checkpoints to keep in this tier; those that it selects are promoted to it.
        rate_bytes_per_second: Limit of the rate at which a promoter writes to this tier; None for no limit. Not for the
            first tier, to which nothing is promoted.

    Raises:
        TiersError: The rate is not positive.
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

    def __post_init__(self) -> None:
        root = os.fspath(self.root)
        if scheme_of(root) == "file":
            root = os.path.abspath(file_path(root))
        object.__setattr__(self, "root", root.rstrip("/") or "/")
        if self.rate_bytes_per_second is not None and not self.rate_bytes_per_second > 0:
            raise TiersError(f"tier {root}: rate_bytes_per_second is {self.rate_bytes_per_second}; it must be positive")

    @property
    def url(self) -> str:
        """The absolute path, or the URI, of the tier's folder."""
        return os.fspath(self.root)
