"""`ResumableSampler`: batches of indices of a map-style data set, from a position that all ranks share."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any, Protocol

import torch
from torch.utils.data import default_collate

from dcp_data.keys import derive_keys, mixed_bits
from dcp_data.loader import ResumableLoader, SampleReader
from dcp_data.permutation import Permutation
from dcp_data.position import Position, with_digest
from dcp_data.rank_batches import Part

_PROBES = 512
"""Positions that are compared on resume."""


class ResumableSampler(Position):
    """Batch sampler of a map-style data set. Its position is saved once, and continues on any number of ranks.

    All ranks go through one order per epoch, which depends on `seed` and the epoch alone. Each step consumes
    `global_batch_size` samples, and each rank gets a slice of them, in rank order. A job that stops between two steps
    and resumes with another number of ranks or workers continues with the same global batches: no sample is repeated
    or omitted. Orders by weights are equal on every machine.

    Get the batches from `loader`. For a plain `DataLoader`, use the object as batch sampler, and call `advance` after
    each step.

    Args:
        dataset: The data set, or the number of its elements.
        global_batch_size: Samples per optimizer step, over all ranks.
        shuffle: Use a pseudo-random order, another one in each epoch, in memory that does not grow with the data set.
        seed: Seed of the order.
        weights: One relative probability per element. A resume within an epoch needs the same weights.
        replacement: Draw with replacement; with False, no element is drawn twice in an epoch.
        num_samples: Samples of an epoch, with weights; by default the number of elements.
        order: Function from an epoch's number to its indices, a sequence or tensor that is equal on all ranks. It
            replaces `shuffle` and `weights`. Lists, tensors and arrays are copied.
        micro_batches: Batches per rank and step, for gradient accumulation.
        drop_last: Skip an incomplete last global batch. Otherwise it is cut into smaller parts without padding, see
            `ResumableLoader.weight`.
        rank: This rank among the ranks that share the data (the data-parallel dimension). By default the rank in the
            default process group, read when batches are drawn.
        world_size: Number of these ranks; by default the process group's, or 1. Pass both or neither.

    Ranks: Each rank creates its own; nothing is communicated.

    Example:
        ```python
        import torch
        from dcp_data import ResumableSampler

        dataset = torch.arange(100)
        sampler = ResumableSampler(dataset, global_batch_size=8, seed=1, rank=0, world_size=2)
        loader = sampler.loader(dataset, num_workers=0)
        for batch in loader:
            assert len(batch) == 4
            if sampler.samples_in_epoch == 48:
                break
        state = sampler.state_dict()  # dcp.save({"data": sampler}, …) does it

        resumed = ResumableSampler(dataset, global_batch_size=8, rank=0, world_size=1)
        resumed.load_state_dict(state)
        assert sum(len(batch) for batch in resumed.loader(dataset)) == 52
        ```
    """

    def __init__(
        self,
        dataset: Sized | int,
        global_batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        weights: Sequence[float] | torch.Tensor | None = None,
        replacement: bool = True,
        num_samples: int | None = None,
        order: Callable[[int], Sequence[int] | torch.Tensor] | None = None,
        micro_batches: int = 1,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        super().__init__(
            global_batch_size,
            seed=seed,
            micro_batches=micro_batches,
            drop_last=drop_last,
            rank=rank,
            world_size=world_size,
        )
        self._elements = len(dataset) if isinstance(dataset, Sized) else operator.index(dataset)
        if order is not None and weights is not None:
            raise ValueError("order= and weights= both say which elements come when: pass one of them")
        if weights is None and (num_samples is not None or not replacement):
            raise ValueError("num_samples= and replacement= are for weights=: pass weights, or an order of your own")
        self._shuffle = shuffle
        self._function = order
        self._weights = None if weights is None else _checked_weights(weights, self._elements)
        self._replacement = replacement
        self._draws = self._elements if num_samples is None else operator.index(num_samples)
        if self._weights is not None and not replacement:
            self._draws = _drawable(self._weights, num_samples)
        self._drawn_name = ""
        self._order: tuple[int, int, _Order] | None = None  # of an epoch and seed

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's batches of indices from the position to the end of the epoch, without counting them.

        A `DataLoader` asks far ahead of training, so `advance` counts there.
        """
        if self._progress.iterated and self._ended():
            self.set_epoch(self.epoch + 1)
        self._progress.iterated = True
        return (part.indices for part, _ in self._parts())

    def advance(self, steps: int = 1) -> None:
        """Count optimizer steps since the last call, for a plain `DataLoader`.

        Raises:
            RuntimeError: A loader counts already, or the epoch has fewer steps.
        """
        if self._progress.is_counted:
            raise RuntimeError("the loader counts the batches that it hands out: do not call advance() beside it")
        for _ in range(steps):
            if self._ended():
                raise RuntimeError(
                    f"epoch {self.epoch} has ended: all of its {self._length()} samples are counted. Call advance() "
                    "once for each optimizer step, and set_epoch() between epochs"
                )
            self._progress.samples = min(self.samples_in_epoch + self.global_batch_size, self._length())

    def loader(
        self,
        dataset: Any,
        *,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        seed_samples: bool = True,
        **options: Any,
    ) -> ResumableLoader:
        """Return a loader of this rank's batches, which counts them.

        Args:
            dataset: The data set. Its `__getitem__` is called with one index.
            collate_fn: Function from a list of samples to a batch.
            seed_samples: Seed torch (CPU), Python and numpy for each sample by seed, epoch and position, so that
                augmentation does not depend on ranks and workers. It takes some 20 µs per sample and keeps the
                trainer's generators.
            options: Other arguments of `torch.utils.data.DataLoader`, such as `num_workers`.

        Raises:
            ValueError: The data set has another number of elements than the sampler.
            TypeError: The sampler decides an option, such as `batch_size`.
        """
        if isinstance(dataset, Sized) and len(dataset) != self._elements:
            raise ValueError(f"the sampler is for {self._elements} elements, but the data set has {len(dataset)}")
        reader = SampleReader(_Elements(dataset), collate_fn, seed_samples=seed_samples)
        return ResumableLoader(self, dataset, reader, self._progress, self._parts, options)

    def _settings(self) -> dict[str, int | str]:
        return {"dataset_length": self._elements, "samples_per_epoch": self._length(), "order": self._order_name()}

    def _order_name(self) -> str:
        """Return the order with its algorithm's version: saved orders keep their meaning."""
        if self._function is not None:
            return with_digest("function", "indices", self._probed())
        if self._weights is not None:
            self._drawn_name = self._drawn_name or with_digest(
                "drawn/1" if self._replacement else "drawn without replacement/1", "weights", self._weights
            )
            return self._drawn_name
        return "shuffled/1" if self._shuffle else "sequential"

    def _probed(self) -> torch.Tensor:
        length = self._length()
        return self._indices(torch.arange(0, length, max(1, length // _PROBES), device="cpu"))

    def _length(self) -> int:
        return self._current_order().length

    def _indices(self, positions: torch.Tensor) -> torch.Tensor:
        return self._current_order().take(positions)

    def _current_order(self) -> _Order:
        if self._order is None or self._order[:2] != (self.epoch, self.seed):
            self._order = self.epoch, self.seed, self._make_order()
        return self._order[2]

    def _make_order(self) -> _Order:
        labels = ("order", self.seed, self.epoch)
        if self._function is not None:
            return _Listed(self._function(self.epoch), self._elements)
        if self._weights is not None and self._replacement:
            return _Drawn(self._weights, self._draws, *labels)
        if self._weights is not None:
            return _draw_without_replacement(self._weights, self._draws, *labels)
        return Permutation(self._elements, *labels) if self._shuffle else _Sequential(self._elements)


class _Order(Protocol):
    length: int

    def take(self, positions: torch.Tensor) -> torch.Tensor: ...


class _Sequential:
    def __init__(self, length: int) -> None:
        self.length = length

    def take(self, positions: torch.Tensor) -> torch.Tensor:
        return positions


class _Listed:
    """Indices that a function returns, or that were drawn; tensors, arrays and lists are copied."""

    def __init__(self, indices: Sequence[int] | torch.Tensor, elements: int) -> None:
        # Another sequence may be longer than memory, so its indices are checked when they are used.
        is_lazy = not (isinstance(indices, list | tuple | torch.Tensor) or hasattr(indices, "__array__"))
        self._indices = indices if is_lazy else _whole_numbers(torch.as_tensor(indices, device="cpu"), elements)
        self._elements = elements
        self.length = len(self._indices)

    def take(self, positions: torch.Tensor) -> torch.Tensor:
        if isinstance(self._indices, torch.Tensor):
            return self._indices[positions]
        return _whole_numbers(
            torch.as_tensor([self._indices[each] for each in positions.tolist()], device="cpu"), self._elements
        )


def _whole_numbers(indices: torch.Tensor, elements: int) -> torch.Tensor:
    """Return a copy in int64. Raises ValueError for other things than indices of elements."""
    is_whole = not (indices.dtype.is_floating_point or indices.dtype.is_complex or indices.dtype == torch.bool)
    if indices.dim() != 1 or not (is_whole or not len(indices)):
        raise ValueError(
            f"order= gave {indices.dtype} of shape {tuple(indices.shape)}: return a list of indices, as from "
            "mask.nonzero().flatten() for a mask"
        )
    indices = indices.to(torch.int64, copy=True)
    wrong = indices[(indices < 0) | (indices >= elements)]
    if len(wrong):
        raise ValueError(f"order= gave the index {int(wrong[0])}, but the data set has {elements} elements, from 0 on")
    return indices


class _Elements:
    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __call__(self, part: Part) -> Iterator[Any]:
        return map(self._dataset.__getitem__, part.indices)


def _drawable(weights: torch.Tensor, num_samples: int | None) -> int:
    most = int((weights > 0).sum())
    if num_samples is not None and num_samples > most:
        raise ValueError(f"num_samples={num_samples} cannot be drawn without replacement from {most} weights above 0")
    return most if num_samples is None else operator.index(num_samples)


_FRACTION_BITS = 52
_LEAST_SUM = 2.0**-960


def _checked_weights(weights: Sequence[float] | torch.Tensor, length: int) -> torch.Tensor:
    """Return a float64 copy on the CPU, whatever the defaults are. Raises ValueError for invalid weights."""
    if not isinstance(weights, torch.Tensor):
        weights = torch.as_tensor(weights, dtype=torch.float64, device="cpu")
    weights = weights.detach().to("cpu", torch.float64) + 0.0  # -0.0 becomes 0.0
    if weights.shape != (length,):
        raise ValueError(f"weights has shape {tuple(weights.shape)}, but the data set has {length} elements")
    if not bool((torch.isfinite(weights) & (weights >= 0)).all()) or not bool((weights > 0).any()):
        raise ValueError("weights must be finite numbers from 0 on, and not all 0")
    if not _LEAST_SUM < float(weights.sum()) < math.inf:
        raise ValueError(f"the sum of the weights is {float(weights.sum())}: multiply all weights by the same number")
    return weights


class _Drawn:
    def __init__(self, weights: torch.Tensor, length: int, *labels: int | str) -> None:
        self.length = length
        # Whole numbers, because sums of fractions depend on the machine: probabilities are exact to 2^-52.
        _, exponent = math.frexp(float(weights.sum()))
        self._sums = torch.cumsum(torch.round(weights * 2.0 ** (_FRACTION_BITS - exponent)).long(), 0)
        self._keys = derive_keys(8, *labels)

    def take(self, positions: torch.Tensor) -> torch.Tensor:
        total = int(self._sums[-1])
        points = (uniform(positions, self._keys) * float(total)).long().clamp_(max=total - 1)
        return torch.searchsorted(self._sums, points, right=True)


def _draw_without_replacement(weights: torch.Tensor, length: int, *labels: int | str) -> _Listed:
    """Return `length` elements of weights above 0, drawn in order, in 16 bytes per element of the data set.

    Source: P. Efraimidis, P. Spirakis, "Weighted random sampling with a reservoir" (2006), algorithm A.
    """
    numbers = torch.arange(len(weights), device="cpu")
    waits = -_logarithm(uniform(numbers, derive_keys(8, *labels))) / weights
    waits.clamp_(max=torch.finfo(waits.dtype).max)[weights == 0] = math.inf  # after the lightest one
    return _Listed(torch.sort(waits, stable=True).indices[:length], len(weights))


def uniform(numbers: torch.Tensor, keys: list[int]) -> torch.Tensor:
    """Return a pseudo-random float64 above 0 and below 1 for each number, from 8 keys of 32 bits."""
    # Numbers of more than 32 bits count with both halves.
    upper = mixed_bits((numbers & 0xFFFFFFFF) ^ mixed_bits(numbers >> 32, *keys[0:2]), *keys[2:4])
    lower = mixed_bits(upper ^ keys[4], keys[5], keys[6]) ^ mixed_bits(numbers & 0xFFFFFFFF, keys[7], keys[0])
    bits = ((upper << 20) ^ (lower & 0xFFFFF)).double()
    return (bits + 0.5) / (1 << 52)


def _logarithm(fractions: torch.Tensor) -> torch.Tensor:
    """Return the natural logarithm, by operations that every CPU rounds equally."""
    mantissas, exponents = torch.frexp(fractions)  # from 0.5 to 1
    ratio = (mantissas - 1) / (mantissas + 1)
    square = ratio * ratio
    series = torch.zeros_like(ratio)
    for odd in range(25, 0, -2):
        series = series * square + 1 / odd
    # In float32, whatever the default dtype is: orders of saved positions depend on this rounding.
    return 2 * ratio * series + exponents.to(torch.float32) * math.log(2)
