"""Names of the files of a checkpoint: the index, rank-local indexes, and data files."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = [
    "DATA_SUFFIX",
    "METADATA_NAME",
    "SAVE_MARKER_PREFIX",
    "RankIndexName",
    "data_file_name",
    "data_file_prefix",
    "is_index_name",
    "rank_index_name",
    "rank_of_data_file",
    "rank_prefix",
]

METADATA_NAME = ".metadata"
"""Name of the index of a whole checkpoint. The checkpoint exists as soon as this file exists."""
DATA_SUFFIX = ".distcp"
"""Suffix of data files."""
SAVE_MARKER_PREFIX = ".dcp-save-"
"""Prefix of the names of save markers, which show that a save is running; `dcp_io` writes them."""
_RANK_INDEX = re.compile(r"__(?P<rank>\d{1,9})(?:\.(?P<save_id>[A-Za-z0-9_-]+))?\.metadata", re.ASCII)
_RANK_DATA = re.compile(r"__(\d{1,9})_", re.ASCII)


def rank_prefix(rank: int) -> str:
    """Return the beginning of the names of a rank's files, such as `__3`; in data files `_` follows, in indexes `.`."""
    return f"__{rank}"


def data_file_prefix(rank: int) -> str:
    """Return the beginning of the names of a rank's data files, such as `__3_`."""
    return f"{rank_prefix(rank)}_"


def data_file_name(prefix: str, number: int, save_id: str) -> str:
    """Return the name of a data file, such as `__3_0.<save id>.distcp`.

    Args:
        prefix: Prefix of the rank, as `data_file_prefix` returns it, or a prefix that a storage writer chose.
        number: Number of the file among the rank's files, from 0.
        save_id: Id of the save; it makes the names differ from those of earlier saves.
    """
    return f"{prefix}{number}.{save_id}{DATA_SUFFIX}"


def rank_of_data_file(name: str) -> int | None:
    """Return the rank whose data files have names like `name`, in stock's checkpoints too; None for other names."""
    found = _RANK_DATA.match(name)
    return int(found[1]) if found else None


@dataclass(frozen=True, slots=True)
class RankIndexName:
    """Parsed name of a rank-local index."""

    rank: int
    save_id: str | None
    """Id of the save; None for `__<rank>.metadata`, which is overwritten by each save."""

    def __str__(self) -> str:
        save_id = "" if self.save_id is None else f".{self.save_id}"
        return f"{rank_prefix(self.rank)}{save_id}{METADATA_NAME}"


def rank_index_name(name: str) -> RankIndexName | None:
    """Parse `__<rank>.metadata` or `__<rank>.<save id>.metadata`; None for any other name."""
    found = _RANK_INDEX.fullmatch(name)
    return RankIndexName(int(found["rank"]), found["save_id"]) if found else None


def is_index_name(name: str) -> bool:
    """Whether a file name is that of an index: of a whole checkpoint, or of one rank."""
    return name == METADATA_NAME or _RANK_INDEX.fullmatch(name) is not None
