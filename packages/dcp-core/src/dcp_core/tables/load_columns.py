"""Read items of ordinary tensors that are stored whole, as columns without a record for each.

Most tensors of an unsharded template are stored whole; all other tensors have records.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from dcp_core.records.lazy import LazyList
from dcp_core.records.metadata import MetadataIndex
from dcp_core.records.plan import LoadItemType, ReadItem
from dcp_core.shards.tensor_checks import has_memory
from dcp_core.tables.records_of_index import StateRecords
from dcp_core.tables.value_table import is_plain

__all__ = ["ReadColumns", "WholeTensors", "read_columns_of"]


@dataclass(slots=True)
class ReadColumns:
    """Read items of one rank: names of tensors that are read as a whole, and records of all other items."""

    records: StateRecords
    """Metadata records of the checkpoint's tensors and objects, by FQN."""
    names: list[str] = field(default_factory=list)
    """FQNs of the tensors that are read as a whole, from their only chunk."""
    others: list[ReadItem] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.names) + len(self.others)

    def __iter__(self) -> Iterator[ReadItem]:
        yield from map(self.whole, self.names)
        yield from self.others

    def whole(self, name: str) -> ReadItem:
        """Return the `ReadItem` that reads the whole tensor with this FQN, which must be in `self.names`."""
        lengths = torch.Size(self.records.single[self.records.tensors[name]] or ())
        nothing = torch.Size((0,) * len(lengths))
        index = MetadataIndex(name, nothing, 0)
        return ReadItem(LoadItemType.TENSOR, index, nothing, index, nothing, lengths)


class WholeTensors:
    """Test whether tensors of a template are unsharded, and stored in one chunk with the same shape and dtype.

    Args:
        records: Metadata records of the checkpoint, unchanged since they were read.
    """

    def __init__(self, records: StateRecords) -> None:
        self._rows = records.tensors
        self._shapes = records.single
        self._dtypes = records.dtypes
        self._dtype_rows = records.index.tensor_dtype.tolist()

    def match(self, fqn: str, value: object) -> bool:
        """Return whether `value` is an unsharded tensor that is stored under this FQN in one chunk.

        The stored tensor must have the same shape and dtype, and the tensor in the template must have memory.
        """
        row = self._rows.get(fqn)
        return (
            row is not None
            and is_plain(value)
            and value.shape == self._shapes[row]
            and value.dtype == self._dtypes[self._dtype_rows[row]]
            and has_memory(value)
        )


def read_columns_of(items: Sequence[ReadItem]) -> ReadColumns | None:
    """Return the columns from which a load plan's items are created; None if they exist as records already."""
    source = items.source if isinstance(items, LazyList) else None
    return source if isinstance(source, ReadColumns) else None
