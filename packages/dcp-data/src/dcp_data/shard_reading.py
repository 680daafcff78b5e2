"""Read shards in the workers: by index if the shard supports it, otherwise in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from dcp_data.lanes import Block, Lanes, Layout
from dcp_data.rank_batches import Part

_END = object()


class ShardReader:
    """Read the transformed samples of a part, with one open shard and one block per lane in memory."""

    def __init__(
        self,
        shards: Sequence[Any] | Callable[[int], Any],
        lengths: Sequence[int],
        transform: Callable[[Any], Any] | None,
    ) -> None:
        self._shards = shards
        self._lengths = lengths
        self._transform = transform
        self._of: tuple[Lanes, int, int] | None = None
        self._layout: Layout | None = None
        self._lanes: dict[int, _Lane] = {}

    def __call__(self, part: Part) -> Iterator[Any]:
        """Yield a part's transformed samples in order."""
        layout = self._layout_of(part)
        for position in range(part.start, part.start + len(part.indices)):
            block, number = layout.block_of(position)
            if block.lane not in self._lanes:
                self._lanes[block.lane] = _Lane(self._open, self._lengths, layout)
            sample = self._lanes[block.lane].sample(block, number)
            yield sample if self._transform is None else self._transform(sample)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_of": None, "_layout": None, "_lanes": {}}  # open files stay where they are

    def _layout_of(self, part: Part) -> Layout:
        if part.lanes is None:
            raise TypeError("the part is of a sampler, not of a stream")
        of = (part.lanes, part.seed, part.epoch)
        if self._layout is None or self._of != of:
            self._of, self._layout = of, Layout(self._lengths, *of)
            self._lanes = {}
        return self._layout

    def _open(self, shard: int) -> Any:
        opened = self._shards(shard) if callable(self._shards) else self._shards[shard]
        return opened() if callable(opened) and not hasattr(opened, "__iter__") else opened


class _Lane:
    def __init__(self, open_shard: Callable[[int], Any], lengths: Sequence[int], layout: Layout) -> None:
        self._open = open_shard
        self._lengths = lengths
        self._layout = layout
        self._block: Block | None = None
        self._order: list[int] = []
        self._samples: list[Any] | None = None  # of the block, unless its shards are read by index
        self._shard = -1
        self._opened: Any = None
        self._iterator: Iterator[Any] | None = None
        self._next = 0

    def sample(self, block: Block, number: int) -> Any:
        if block.stop - block.start == 1:
            return self._read(block.start)
        if block != self._block:
            self._block, self._order = block, self._layout.order_in(block)
            self._samples = (
                None if self._is_indexed(block) else [self._read(place) for place in range(block.start, block.stop)]
            )
        place = self._order[number]
        return self._read(place) if self._samples is None else self._samples[place - block.start]

    def _is_indexed(self, block: Block) -> bool:
        place = block.start
        while place < block.stop:
            shard, offset = self._layout.shard_at(place)
            if not _is_indexed(self._take(shard)):
                return False
            place += self._lengths[shard] - offset
        return True

    def _take(self, shard: int) -> Any:
        if shard != self._shard:
            self._shard, self._opened, self._iterator = shard, self._open(shard), None
        return self._opened

    def _read(self, place: int) -> Any:
        shard, offset = self._layout.shard_at(place)
        opened = self._take(shard)
        if _is_indexed(opened):
            return opened[offset]
        if self._iterator is None or self._next > offset:
            if self._iterator is not None:
                self._opened = opened = self._open(shard)  # a generator can be read once
            starts = hasattr(opened, "iter_from")
            self._iterator, self._next = (opened.iter_from(offset), offset) if starts else (iter(opened), 0)
        sample = next(islice(self._iterator, offset - self._next, None), _END)
        self._next = offset + 1
        length = self._lengths[shard]
        if sample is _END:
            raise ValueError(f"shard {shard} has fewer samples than its length of {length}: correct lengths=")
        if self._next == length and next(self._iterator, _END) is not _END:
            raise ValueError(f"shard {shard} has more samples than its length of {length}: correct lengths=")
        return sample


def _is_indexed(shard: Any) -> bool:
    return hasattr(shard, "__getitem__") and hasattr(shard, "__len__")
