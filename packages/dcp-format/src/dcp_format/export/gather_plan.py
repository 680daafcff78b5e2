"""Plan of the tensors whose bytes ranks pass on to each other, so that each range of a file is written by one of them.

A tensor that is sharded by columns would be one small write for each of its rows and ranks. Objects of an object store
are written by one rank each. Not in this module: sending and writing; see `gathering`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from dcp_core import SavePlan
from dcp_format.export.box_writes import BoxRuns
from dcp_format.export.file_map import ExportedTensor, PlannedFile, TensorPlace
from dcp_format.export.items import tensor_data_of
from dcp_manifest import ITEM_BYTES

__all__ = ["Gather", "OwnerOf", "RankBox", "cells_of", "gather_all", "gather_columns"]

_BAND_BYTES = 4 << 20
# A guess: on ext4, runs of 8 KiB took as long to pass on as to write one by one; shorter ones are more system calls.
_SMALL_RUN_BYTES = 256 << 10
OwnerOf = Callable[[int, int], int]


@dataclass(frozen=True, slots=True)
class RankBox:
    """A box of a tensor that one rank holds; offsets and sizes in elements."""

    rank: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Gather:
    """A tensor whose ranges of bytes, the bands, are each written by one rank, which gets the other ranks' parts.

    Attributes:
        number: Number of the tensor; the tensors of a file have ascending numbers in the order of their data.
        fqn: FQN of the tensor.
        place: Place of the tensor.
        shape: Sizes of the tensor, in elements.
        boxes: Boxes of all ranks; together they are the tensor.
        stops: For each band, the offset in the tensor after its last byte; each begins where the last one ended.
        owners: For each band, the rank that writes it.
    """

    number: int
    fqn: str
    place: TensorPlace
    shape: tuple[int, ...]
    boxes: Sequence[RankBox]
    stops: Sequence[int]
    owners: Sequence[int]

    @property
    def ranks(self) -> set[int]:
        """Ranks that send or write parts of the tensor."""
        return {box.rank for box in self.boxes} | {*self.owners}

    def runs(self, box: RankBox) -> BoxRuns:
        """Return the runs of bytes of a box in the tensor."""
        return BoxRuns(self.shape, box.offsets, box.sizes, ITEM_BYTES[self.place.dtype])


def gather_columns(plans: Sequence[SavePlan], files: Iterable[PlannedFile]) -> list[Gather]:
    """Return the tensors of which several ranks hold boxes of short runs; their ranks take turns as owners of bands."""
    boxes = _boxes(plans)
    found = []
    for tensor, place, number in _placed(files):
        holders = sorted({box.rank for box in boxes[tensor.fqn]})
        if len(holders) > 1 and any(_is_scattered(tensor, box) for box in boxes[tensor.fqn]):
            found.append(_gather(number, tensor, place, boxes, partial(_take_turns, holders)))
    return found


def _take_turns(ranks: Sequence[int], cell: int) -> int:
    return ranks[cell % len(ranks)]


def gather_all(plans: Sequence[SavePlan], files: Iterable[PlannedFile], owner_of: OwnerOf) -> list[Gather]:
    """Return all tensors that have bytes.

    Args:
        plans: Final plans of all ranks.
        files: The files.
        owner_of: Function (number of a file, number of a 4 MiB cell of it) → rank that writes the cell.
    """
    files, boxes = list(files), _boxes(plans)
    numbers = {file.temporary: number for number, file in enumerate(files)}
    return [
        _gather(number, tensor, place, boxes, partial(owner_of, numbers[place.file]))
        for tensor, place, number in _placed(files)
        if tensor.nbytes
    ]


def cells_of(size: int) -> int:
    """Return the number of cells of a file: aligned ranges of 4 MiB, each of which one rank writes."""
    return max(1, -(-size // _BAND_BYTES))


def _placed(files: Iterable[PlannedFile]) -> Iterator[tuple[ExportedTensor, TensorPlace, int]]:
    """Yield the tensors of all files with their places and their numbers."""
    number = 0
    for file in files:
        places = file.places()
        for tensor in file.tensors:
            yield tensor, places[tensor.fqn], number
            number += 1


def _boxes(plans: Sequence[SavePlan]) -> Mapping[str, list[RankBox]]:
    found: dict[str, list[RankBox]] = defaultdict(list)
    for rank, plan in enumerate(plans):
        for item in plan.items:
            chunk = tensor_data_of(item).chunk
            found[item.index.fqn].append(RankBox(rank, tuple(chunk.offsets), tuple(chunk.sizes)))
    return found


def _is_scattered(tensor: ExportedTensor, box: RankBox) -> bool:
    runs = BoxRuns(tensor.shape, box.offsets, box.sizes, ITEM_BYTES[tensor.dtype])
    return runs.count > 1 and 0 < runs.run_bytes < _SMALL_RUN_BYTES


def _gather(
    number: int,
    tensor: ExportedTensor,
    place: TensorPlace,
    boxes: Mapping[str, list[RankBox]],
    owner_of: Callable[[int], int],
) -> Gather:
    """Cut a tensor where the file has a multiple of 4 MiB."""
    first = place.offset // _BAND_BYTES
    last = -(-(place.offset + tensor.nbytes) // _BAND_BYTES)
    stops = [min((cell + 1) * _BAND_BYTES - place.offset, tensor.nbytes) for cell in range(first, last)]
    owners = [owner_of(cell) for cell in range(first, last)]
    return Gather(number, tensor.fqn, place, tensor.shape, tuple(boxes[tensor.fqn]), tuple(stops), tuple(owners))
