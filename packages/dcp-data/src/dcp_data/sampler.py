"""`ResumableSampler`: batches of indices of a map-style data set, from a position that is the same for all ranks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import default_collate

from dcp_data.loader import ResumableLoader, SampleReader
from dcp_data.orders import Listed, Order, Sequential
from dcp_data.parts import Part
from dcp_data.permutation import Permutation
from dcp_data.position import Position
from dcp_data.weighted import Drawn, checked_weights, draw_without_replacement

__all__ = ["ResumableSampler"]


class ResumableSampler(Position):
    """Batch sampler of a map-style data set whose position is saved once, and continues on any number of ranks.

    All ranks together go through one order of the data set for each epoch, which depends on `seed` and the epoch alone.
    Step by step they consume `global_batch_size` samples of it, of which each rank gets a slice: the first rank the
    first, and so on. A job that is stopped between two steps and resumed with another number of ranks or workers goes
    on with the same global batches: no sample is repeated or left out.

    Use `loader` to get the batches. It is also a batch sampler for a plain `DataLoader`, with `advance` called after
    each step.

    Args:
        dataset: The data set, or the number of its elements.
        global_batch_size: Samples of one optimizer step of all ranks together.
        shuffle: Use a pseudo-random order, another one in each epoch. It takes no memory that grows with the data set.
        seed: Seed of the order.
        weights: Draw elements with probabilities in these proportions, one weight for each element.
        replacement: Draw with replacement; with False, no element comes twice in an epoch.
        num_samples: Samples of an epoch, with weights; by default as many as the data set has elements.
        order: Function from an epoch's number to the indices of this epoch, a sequence or tensor, in place of `shuffle`
            and `weights`. It must give every rank the same.
        micro_batches: Batches of each rank for one step: the steps of gradient accumulation.
        drop_last: Leave out a last global batch that is not full. Otherwise it is cut into smaller parts; nothing is
            padded, see `ResumableLoader.weight`.
        rank: This rank among those that share the data; by default that of the default process group. In a job with
            tensor or pipeline parallelism, the rank in the data-parallel dimension.
        world_size: Number of those ranks; by default that of the default process group, or 1.

    Raises:
        ValueError: Arguments are out of range or do not go together.

    Ranks: Each rank makes its own; nothing is communicated.

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
        self._weights = (
            None if weights is None else checked_weights(torch.as_tensor(weights, device="cpu"), self._elements)
        )
        self._replacement = replacement
        self._draws = self._elements if num_samples is None else operator.index(num_samples)
        if self._weights is not None and not replacement:
            self._draws = _drawable(self._weights, num_samples)
        self._order: tuple[int, int, Order] | None = None  # of an epoch and seed

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's batches of indices from the position to the end of the epoch, without counting them.

        For `DataLoader(dataset, batch_sampler=sampler)`, which asks far ahead of training: `advance` counts there.
        """
        if self._progress.iterated and self._ended():
            self.set_epoch(self.epoch + 1)
        self._progress.iterated = True
        return (part.indices for part, _ in self._parts())

    def advance(self, steps: int = 1) -> None:
        """Count optimizer steps, for a plain `DataLoader`; what `loader` returns counts by itself.

        Args:
            steps: Number of steps that have been taken since the last call.

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
        """Return a loader of this rank's batches, which counts them as it hands them out.

        Args:
            dataset: The data set. Its `__getitem__` is called with one index.
            collate_fn: Function from a list of samples to a batch.
            seed_samples: Seed the random generators of torch (CPU), Python and numpy for each sample by seed, epoch and
                position, so that random augmentation is the same on any number of ranks and workers. It takes some
                20 µs for each sample; the generators of the trainer stay as they are.
            options: More arguments of `torch.utils.data.DataLoader`, such as `num_workers` or `pin_memory`.

        Raises:
            ValueError: The data set has another number of elements than the sampler.
            TypeError: An option is decided by the sampler, such as `batch_size`.
        """
        if isinstance(dataset, Sized) and len(dataset) != self._elements:
            raise ValueError(f"the sampler is for {self._elements} elements, but the data set has {len(dataset)}")
        reader = SampleReader(_Elements(dataset), collate_fn, seed_samples=seed_samples)
        return ResumableLoader(self, dataset, reader, self._progress, self._parts, options)

    def _settings(self) -> dict[str, int | str]:
        return {"dataset_length": self._elements, "samples_per_epoch": self._length(), "order": self._order_name()}

    def _order_name(self) -> str:
        """Return the kind of order, with the version of its algorithm: what is saved must not change its meaning."""
        if self._function is not None:
            return "function"
        if self._weights is not None:
            return "drawn/1" if self._replacement else "drawn without replacement/1"
        return "shuffled/1" if self._shuffle else "sequential"

    def _length(self) -> int:
        return self._current_order().length

    def _indices(self, positions: torch.Tensor) -> torch.Tensor:
        return self._current_order().take(positions)

    def _current_order(self) -> Order:
        if self._order is None or self._order[:2] != (self.epoch, self.seed):
            self._order = self.epoch, self.seed, self._make_order()
        return self._order[2]

    def _make_order(self) -> Order:
        labels = ("order", self.seed, self.epoch)
        if self._function is not None:
            return Listed(self._function(self.epoch))
        if self._weights is not None and self._replacement:
            return Drawn(self._weights, self._draws, *labels)
        if self._weights is not None:
            return draw_without_replacement(self._weights, self._draws, *labels)
        return Permutation(self._elements, *labels) if self._shuffle else Sequential(self._elements)


class _Elements:
    """Function that reads the elements of a part from a map-style data set."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __call__(self, part: Part) -> Iterator[Any]:
        return map(self._dataset.__getitem__, part.indices)


def _drawable(weights: torch.Tensor, num_samples: int | None) -> int:
    most = int((weights > 0).sum())
    if num_samples is not None and num_samples > most:
        raise ValueError(f"num_samples={num_samples} cannot be drawn without replacement from {most} weights above 0")
    return most if num_samples is None else operator.index(num_samples)
