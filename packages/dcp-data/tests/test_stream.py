"""`ResumableStream`: shards of all kinds, what is read, and what does not fit."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from dcp_data import ResumableStream

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

LENGTHS = [7, 0, 12, 1, 20, 8]
WHOLE = [*range(sum(LENGTHS))]


def generated(shard: int, lengths: list[int] = LENGTHS) -> Iterator[int]:
    yield from range(sum(lengths[:shard]), sum(lengths[: shard + 1]))


class WithBegin:
    """A shard that can be read from anywhere, and counts what is read."""

    def __init__(self, samples: list[int]) -> None:
        self.samples = samples
        self.read = 0

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[int]:
        return self.iter_from(0)

    def iter_from(self, offset: int) -> Iterator[int]:
        for each in self.samples[offset:]:
            self.read += 1
            yield each


SHARDS: dict[str, Any] = {
    "function of the number": generated,
    "functions": [partial(generated, shard) for shard in range(len(LENGTHS))],
    "lists": [[*generated(shard)] for shard in range(len(LENGTHS))],
    "tensors": [torch.tensor([*generated(shard)]) for shard in range(len(LENGTHS))],
    "with a begin": [WithBegin([*generated(shard)]) for shard in range(len(LENGTHS))],
    "sets": [{*generated(shard)} for shard in range(len(LENGTHS))],
}


def stream(shards: Any = generated, global_batch_size: int = 8, **options: Any) -> ResumableStream:
    given = {"rank": 0, "world_size": 1, "lengths": LENGTHS, **options}
    return ResumableStream(shards, global_batch_size, **given)


def epoch_of(made: ResumableStream, **options: Any) -> list[int]:
    found = []
    for batch in made.loader(**options):
        found += batch.tolist()
    return found


@pytest.mark.parametrize("buffer", [0, 5, 100])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", SHARDS)
def test_all_kinds_of_shards_give_the_same_stream(kind: str, workers: int, buffer: int) -> None:
    found = epoch_of(stream(SHARDS[kind], shuffle_buffer=buffer), num_workers=workers)
    assert found == epoch_of(stream(shuffle_buffer=buffer))
    assert sorted(found) == WHOLE


def test_orders_depend_on_seed_epoch_and_buffer() -> None:
    made = stream(seed=1, shuffle_buffer=4)
    orders = [epoch_of(made), epoch_of(made), epoch_of(stream(seed=2, shuffle_buffer=4)), epoch_of(stream(seed=1))]
    assert len({tuple(order) for order in orders}) == 4
    assert epoch_of(stream(seed=1, shuffle_buffer=4)) == orders[0]


def test_orders_never_change() -> None:
    """Saved positions belong to them: another algorithm needs another name in the state."""
    made = stream(seed=1, shuffle_buffer=4, lanes=4, chunk=2)
    assert epoch_of(made)[:24] == [
        20,
        23,
        33,
        34,
        11,
        12,
        44,
        47,
        22,
        21,
        32,
        37,
        14,
        13,
        45,
        0,
        24,
        27,
        36,
        35,
        16,
        15,
        46,
        3,
    ]


def test_one_lane_without_shuffling_is_the_order_of_the_shards() -> None:
    assert epoch_of(stream(shuffle=False, lanes=1, chunk=1)) == WHOLE


def test_lengths_are_asked_of_the_shards() -> None:
    assert sorted(epoch_of(stream(SHARDS["lists"], lengths=None))) == WHOLE


@pytest.mark.parametrize("workers", [0, 1, 4])
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0], [3], [0, 1]])
def test_few_samples_and_none(lengths: list[int], workers: int) -> None:
    """Fewer shards than workers, fewer samples than a global batch, and nothing at all."""
    steps = []
    found = []
    for rank in range(3):
        made = ResumableStream(partial(generated, lengths=lengths), 8, lengths=lengths, rank=rank, world_size=3)
        loader = made.loader(num_workers=workers)
        batches = [batch.tolist() if loader.weight else [] for batch in loader]
        steps.append(len(batches))
        found += [*itertools.chain.from_iterable(batches)]
        assert (made.epoch, made.samples_in_epoch) == (1, 0)
    assert steps == [min(1, sum(lengths))] * 3
    assert sorted(found) == [*range(sum(lengths))]


# What is read.


class Counted:
    """Shards whose reads are counted."""

    def __init__(self, shards: int, length: int) -> None:
        self.reads: list[tuple[int, int]] = []
        self.lengths = [length] * shards

    def __call__(self, shard: int) -> Iterator[int]:
        for sample in range(self.lengths[shard]):
            self.reads.append((shard, sample))
            yield shard * self.lengths[shard] + sample


@pytest.mark.parametrize("buffer", [0, 10])
def test_a_rank_with_lanes_of_its_own_reads_what_it_needs_once(buffer: int) -> None:
    for ranks in (1, 2, 4, 8):
        shards = Counted(96, 40)
        read = []
        for rank in range(ranks):
            shards.reads.clear()
            made = ResumableStream(
                shards, 8, lengths=shards.lengths, shuffle_buffer=buffer, rank=rank, world_size=ranks
            )
            epoch_of(made)
            assert len({*shards.reads}) == len(shards.reads)
            read.append(len(shards.reads))
        assert read == [96 * 40 // ranks] * ranks


def test_a_resume_reads_again_the_shards_and_blocks_that_were_begun() -> None:
    """96 lanes of 2 shards of 20 samples, 25 of each lane consumed: no first shard is opened again."""
    shards = Counted(192, 20)
    made = ResumableStream(shards, 8, lengths=shards.lengths, shuffle_buffer=10, rank=0, world_size=1)
    batches = iter(made.loader())
    for _ in range(300):
        next(batches)
    again = ResumableStream(shards, 8, lengths=shards.lengths, shuffle_buffer=10, rank=0, world_size=1)
    again.load_state_dict(made.state_dict())
    shards.reads.clear()
    assert len(epoch_of(again)) == 96 * 15
    assert len(shards.reads) <= 96 * (20 + 10)
    indexed = [WithBegin([*range(20)]) for _ in range(192)]
    again = ResumableStream(indexed, 8, shuffle_buffer=10, rank=0, world_size=1)
    again.load_state_dict(made.state_dict())
    epoch_of(again)
    assert sum(shard.read for shard in indexed) <= 96 * (15 + 10)


def test_what_is_skipped_is_not_transformed() -> None:
    transformed: list[int] = []

    def noted(sample: int) -> int:
        transformed.append(sample)
        return sample + 1000

    found = epoch_of(stream(transform=noted, rank=1, world_size=2))
    assert found == [each + 1000 for each in transformed]
    assert len(found) < len(WHOLE)


def test_random_transforms_are_the_same_on_any_number_of_ranks_and_workers() -> None:
    def rows(ranks: int, workers: int) -> list[tuple[float, ...]]:
        noise = partial(_noisy, 100)
        made = [stream(transform=noise, rank=rank, world_size=ranks, shuffle_buffer=3) for rank in range(ranks)]
        parts = [[*each.loader(num_workers=workers)] for each in made]
        return [tuple(row.tolist()) for step in zip(*parts, strict=True) for part in step for row in part]

    assert rows(2, 0) == rows(1, 0) == rows(2, 2)


def _noisy(scale: int, sample: int) -> torch.Tensor:
    return torch.stack([torch.tensor(float(sample)), scale * torch.rand(())])


def test_documents_can_be_packed_within_their_shard() -> None:
    def packed(shard: int) -> Iterator[torch.Tensor]:
        tokens: list[int] = []
        for document in range(6):
            tokens += [100 * shard + document] * (document + 3)
            while len(tokens) >= 8:
                yield torch.tensor(tokens[:8])
                del tokens[:8]

    lengths = [sum(1 for _ in packed(shard)) for shard in range(5)]
    assert lengths == [4] * 5
    whole = torch.cat([*ResumableStream(packed, 4, lengths=lengths, rank=0, world_size=1).loader()])
    assert whole.shape == (20, 8)
    assert len({tuple(row) for row in whole.tolist()}) == 20


# Resuming.


def test_default_lanes_are_those_that_were_saved() -> None:
    made = stream(global_batch_size=8)
    batches = iter(made.loader())
    found = [each for _ in range(2) for each in next(batches).tolist()]
    other = stream(global_batch_size=12)
    assert other.state_dict()["chunk"] != made.state_dict()["chunk"]
    other.load_state_dict(made.state_dict())
    assert found + epoch_of(other) == epoch_of(stream(global_batch_size=8))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"lengths": [7, 1, 12, 1, 20, 8]}, "samples_per_epoch was 48 and is 49"),
        ({"lengths": [*LENGTHS, 0]}, "shards was 6 and is 7"),
        ({"lanes": 2, "chunk": 8}, "lanes was 4 and is 2; chunk was 2 and is 8"),
        ({"shuffle_buffer": 5}, "shuffle_buffer was 0 and is 5"),
        ({"shuffle": False}, "order was 'shuffled/1 of lengths [0-9a-f]{12}' and is 'sequential of lengths "),
        ({"lengths": [*reversed(LENGTHS)]}, "order was 'shuffled/1 of lengths "),
    ],
)
def test_a_position_in_another_stream_is_refused_within_an_epoch_alone(other: dict[str, Any], message: str) -> None:
    saved = {**stream().state_dict(), "samples_in_epoch": 16, "seed": 5}
    made = stream(**other)
    before = made.state_dict()
    with pytest.raises(ValueError, match=message):
        made.load_state_dict(saved)
    assert made.state_dict() == before
    made.load_state_dict({**saved, "samples_in_epoch": 0})


def test_a_state_without_a_digest_is_accepted() -> None:
    made = stream()
    made.load_state_dict({**made.state_dict(), "samples_in_epoch": 16, "order": "shuffled/1"})
    assert made.samples_in_epoch == 16


def test_a_loader_reads_the_lanes_that_were_loaded_after_it_was_made() -> None:
    made = stream(global_batch_size=8)
    next(iter(made.loader()))
    for options in ({"num_workers": 0}, {"num_workers": 1, "persistent_workers": True}):
        other = stream(global_batch_size=12)
        loader = other.loader(**options)
        next(iter(loader))
        other.load_state_dict(made.state_dict())
        assert [each for batch in loader for each in batch.tolist()] == epoch_of(stream())[8:]


def test_open_shards_stay_in_their_process() -> None:
    made = stream(SHARDS["functions"])
    loader = made.loader()
    batches = iter(loader)
    found = next(batches).tolist()
    reader = pickle.loads(pickle.dumps(loader._loader.dataset))  # as a worker that is spawned gets it
    loader._loader.dataset.__dict__.update(reader.__dict__)
    assert found + [each for batch in batches for each in batch.tolist()] == epoch_of(stream())


# What cannot be.


@pytest.mark.parametrize("lengths", [[7, 0, 12, 1, 19, 8], [7, 0, 12, 1, 21, 8]])
@pytest.mark.parametrize("buffer", [0, 4])
def test_lengths_that_are_wrong_are_noticed(lengths: list[int], buffer: int) -> None:
    shards = [partial(generated, shard) for shard in range(6)]
    what = "more" if lengths[4] < 20 else "fewer"
    with pytest.raises(ValueError, match=f"shard 4 has {what} samples than its length of {lengths[4]}"):
        epoch_of(stream(shards, lengths=lengths, shuffle_buffer=buffer))


@pytest.mark.parametrize(
    ("error", "options", "message"),
    [
        (TypeError, {"lengths": None}, "lengths= is missing"),
        (TypeError, {"shards": [[1], iter([2])], "lengths": None}, r"shard 1 has no length \(of 1 such"),
        (ValueError, {"shards": [[1]], "lengths": [1, 2]}, "1 shards, but 2 lengths"),
        (ValueError, {"lengths": [1, -2]}, "shard 1 has a negative length: -2"),
        (ValueError, {"lanes": 3}, "belong together"),
        (ValueError, {"lanes": 0, "chunk": 1}, "lanes=0"),
        (ValueError, {"shuffle_buffer": -1}, "shuffle_buffer=-1"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(error: type[Exception], options: dict[str, Any], message: str) -> None:
    with pytest.raises(error, match=message):
        stream(**options)
