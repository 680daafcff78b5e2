"""`ExportOptions`: the settings of an export, checked before any rank plans or writes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dcp_core import PeerOptions
from dcp_core.toolkit import absolute_id
from dcp_format.content.changes import check_cast
from dcp_format.export.split_names import SplitNames
from dcp_ranks import DEFAULT_TIMEOUT_SECONDS

__all__ = ["MAX_FILE_BYTES", "ExportOptions"]

MAX_FILE_BYTES = 5_000_000_000
# Two would take turns at the interpreter's lock for each row of a column shard: measured 3 times slower.
_THREADS = 1
_RESERVED = "DCP_"


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """Options of an export; see `save_safetensors`. A relative path of `config_from` means the current working folder.

    Raises:
        TypeError: `rename`, `split` or `metadata` does not map strings to strings, or `dtype` is no dtype.
        ValueError: `max_file_bytes` is below 1, `dtype` is not floating-point, a key of `metadata` is reserved, or the
            names in `split` do not fit together.
    """

    max_file_bytes: int = MAX_FILE_BYTES
    dtype: torch.dtype | None = None
    rename: Mapping[str, str] = field(default_factory=dict)
    split: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    config_from: str | os.PathLike[str] | None = None
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    peers: PeerOptions | None = None
    threads: int = _THREADS
    """Number of boxes that a rank writes at the same time."""

    def __post_init__(self) -> None:
        if self.max_file_bytes < 1:
            raise ValueError(f"max_file_bytes={self.max_file_bytes} must be at least 1")
        if self.dtype is not None:
            check_cast(self.dtype)
        for name in ("rename", "split", "metadata"):
            object.__setattr__(self, name, _strings(name, getattr(self, name)))
        reserved = sorted(key for key in self.metadata if key.startswith(_RESERVED))
        if reserved:
            raise ValueError(f"metadata: keys that begin with {_RESERVED} are reserved: rename {reserved[0]!r}")
        SplitNames(self.split)
        if self.config_from is not None:
            object.__setattr__(self, "config_from", absolute_id(self.config_from))

    @property
    def settings(self) -> dict[str, str]:
        """Options that decide about names, sizes and dtypes, as text: they must be the same on all ranks."""
        found = {"max_file_bytes": self.max_file_bytes, "dtype": self.dtype}
        sorted_maps = {name: dict(sorted(getattr(self, name).items())) for name in ("rename", "split")}
        return {name: repr(value) for name, value in (found | sorted_maps).items()}


def _strings(name: str, value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} maps strings to strings, and is a {type(value).__name__}: pass a dict")
    for pair in value.items():
        if not all(isinstance(one, str) for one in pair):
            raise TypeError(f"{name} maps strings to strings, and has {pair[0]!r}: {pair[1]!r}")
    return dict(value)
