"""`ResumableLoader`: a `DataLoader` that counts the batches that it returns, not those that workers prefetch."""

from __future__ import annotations

import contextlib
import importlib
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from dcp_data.keys import derive_seed
from dcp_data.position import Position
from dcp_data.progress import Progress
from dcp_data.rank_batches import Part, Share

_OURS = ("batch_size", "batch_sampler", "drop_last", "sampler", "shuffle")


class SampleReader:
    """Data set of whole batches, read and collated in the workers; with `seed_samples`, each sample is seeded."""

    def __init__(
        self, read: Callable[[Part], Iterator[Any]], collate_fn: Callable[[list[Any]], Any], *, seed_samples: bool
    ) -> None:
        self._read = read
        self._collate_fn = collate_fn
        self._seed_samples = seed_samples

    def __getitem__(self, part: Part) -> Any:
        in_trainer = get_worker_info() is None
        with _generators_kept() if in_trainer and self._seed_samples else contextlib.nullcontext():
            samples: list[Any] = []
            self._seed(part, 0)
            for sample in self._read(part):
                samples.append(sample)
                self._seed(part, len(samples))
            self._seed(part, 0, "batch")
            return self._collate_fn(samples)

    def _seed(self, part: Part, number: int, what: str = "sample") -> None:
        if self._seed_samples:
            _seed_generators(derive_seed(what, part.seed, part.epoch, part.start + number))


class _Batches:
    def __init__(self, parts: Callable[[], Iterator[tuple[Part, Share]]]) -> None:
        self._parts = parts
        self.in_flight: deque[Share] = deque()

    def __iter__(self) -> Iterator[Part]:
        in_flight: deque[Share] = deque()
        self.in_flight = in_flight
        for part, share in self._parts():
            in_flight.append(share)
            yield part


class ResumableLoader:
    """Loader that counts its batches, created by `ResumableSampler.loader` and `ResumableStream.loader`.

    A `for` loop yields this rank's batches from the position to the end of the epoch. The next loop continues with the
    next epoch, or after a `break`. A batch counts when the loop receives it, and a step when its last micro-batch does.
    So save after the optimizer's step and before the next batch.

    Attributes:
        dataset: The data set or stream.
        position: The sampler or stream.
        weight: Factor for the mean loss of the last batch. The sum over a step's micro-batches and the mean over the
            ranks is then the mean over the global batch: 1 / `micro_batches` for parts of equal size.

    Example:
        ```python
        import torch
        from dcp_data import ResumableSampler

        dataset = torch.arange(10.0)
        sampler = ResumableSampler(dataset, global_batch_size=4, rank=0, world_size=1)
        loader = sampler.loader(dataset)
        for batch in loader:
            loss = loader.weight * batch.mean()  # … and the optimizer's step
        assert (sampler.epoch, sampler.samples_in_epoch) == (1, 0)
        ```
    """

    def __init__(
        self,
        position: Position,
        dataset: Any,
        reader: SampleReader,
        progress: Progress,
        parts: Callable[[], Iterator[tuple[Part, Share]]],
        options: dict[str, Any],
    ) -> None:
        if taken := [name for name in _OURS if name in options]:
            raise TypeError(f"{taken[0]}= is decided by the {type(position).__name__}: leave it out")
        if options.get("in_order") is False:
            raise TypeError("in_order=False would hand out batches in an order that nothing can repeat: leave it out")
        self.dataset = dataset
        self.position = position
        self.weight = 1.0
        self._progress = progress
        self._batches = _Batches(parts)
        self._generator = None if "generator" in options else torch.Generator("cpu")
        self._loader: DataLoader[Any] = DataLoader(
            cast(Dataset[Any], reader),
            batch_size=None,  # the reader makes the batches
            sampler=cast(Iterable[Any], self._batches),
            collate_fn=_as_it_is,
            **{"generator": self._generator, **options},
        )

    def __len__(self) -> int:
        """Return this rank's batches in a whole epoch."""
        return len(self.position)

    def state_dict(self) -> dict[str, int | str]:
        """Return the position, for frameworks that save data loaders."""
        return self.position.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, int | str]) -> None:
        """Continue from a saved position."""
        self.position.load_state_dict(state_dict)

    def __iter__(self) -> Iterator[Any]:
        counter = object()
        self._progress.begin(counter)
        if self._generator is not None:  # workers' seeds: without it, they would be drawn from the trainer's generator
            position = self.position
            place = (position.seed, position.epoch, position.samples_in_epoch, position.rank)
            self._generator.manual_seed(derive_seed("workers", *place))
        return self._counted(iter(self._loader), counter)

    def _counted(self, batches: Iterator[Any], counter: object) -> Iterator[Any]:
        progress = self._progress
        try:
            while True:
                progress.check(counter)
                batch = next(batches, _END)
                if batch is _END:
                    progress.move(progress.epoch + 1, 0)
                    return
                share = self._batches.in_flight.popleft()
                self.weight = share.weight
                if share.step_end is not None:
                    progress.samples = share.step_end
                yield batch
        finally:
            progress.release(counter)


_END = object()


def _as_it_is(batch: Any) -> Any:
    return batch


def _seed_generators(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        importlib.import_module("numpy").random.seed(seed & 0xFFFFFFFF)


@contextlib.contextmanager
def _generators_kept() -> Iterator[None]:
    numpy = importlib.import_module("numpy") if "numpy" in sys.modules else None
    of_torch, of_python = torch.default_generator.get_state(), random.getstate()
    of_numpy = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        torch.default_generator.set_state(of_torch)
        random.setstate(of_python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)
