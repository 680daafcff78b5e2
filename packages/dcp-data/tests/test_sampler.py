"""`ResumableSampler` and its loader: orders, what counts, ends of epochs, what does not fit."""

from __future__ import annotations

import collections
import random
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from dcp_data import ResumableSampler

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def sampler(length: int = 40, global_batch_size: int = 8, **options: Any) -> ResumableSampler:
    return ResumableSampler(length, global_batch_size, **{"rank": 0, "world_size": 1, **options})


def epoch_of(made: ResumableSampler, **options: Any) -> list[int]:
    found = []
    for batch in made.loader(range(len_of(made)), **options):
        found += batch.tolist()
    return found


def len_of(made: ResumableSampler) -> int:
    return int(made.state_dict()["dataset_length"])


# Orders.


def test_orders_depend_on_seed_and_epoch_alone() -> None:
    made = sampler(seed=4)
    first, second = epoch_of(made), epoch_of(made)
    assert sorted(first) == sorted(second) == [*range(40)]
    assert first != second
    again = sampler(seed=4, global_batch_size=5)
    again.set_epoch(1)
    assert epoch_of(again) == second
    assert epoch_of(sampler(seed=5)) != first


def test_without_shuffling_it_is_the_data_sets_order() -> None:
    assert epoch_of(sampler(shuffle=False)) == [*range(40)]


@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_an_order_can_be_a_function_of_the_epoch(kind: Any) -> None:
    made = sampler(order=lambda epoch: kind([*range(epoch, 40, 2)]))
    assert epoch_of(made) == [*range(0, 40, 2)]
    assert len(made) == 3
    assert epoch_of(made) == [*range(1, 40, 2)]


@pytest.mark.parametrize("kind", [list, torch.tensor, np.array])
def test_an_order_may_be_changed_by_its_function_afterwards(kind: Any) -> None:
    order = kind([*range(40)])
    made = sampler(order=lambda _: order)
    state = made.state_dict()
    for at in range(40):
        order[at] = 0
    assert made.state_dict() == state
    assert epoch_of(made) == [*range(40)]


@pytest.mark.parametrize("kind", [list, torch.tensor, np.array, collections.UserList])
@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([*range(39), 40], "the index 40, but the data set has 40 elements"),
        ([-1, *range(39)], "the index -1"),
        ([0.5] * 40, "of shape (40,): return a list of indices"),
        ([True, False] * 20, "torch.bool of shape (40,): return a list of indices, as from mask.nonzero()"),
        ([[0, 1]] * 20, "of shape (20, 2)"),
    ],
)
def test_orders_of_other_things_than_indices_are_refused(kind: Any, order: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        epoch_of(sampler(order=lambda _: kind(order)))


def test_draws_with_replacement_follow_the_weights() -> None:
    weights = [0.0, 1.0, 2.0, 7.0]
    made = sampler(4, 1000, weights=weights, num_samples=20_000)
    seen = Counter(epoch_of(made))
    assert seen[0] == 0
    for element in (1, 2, 3):
        expected = 2000 * weights[element]
        assert abs(seen[element] - expected) < 5 * expected**0.5
    assert Counter(epoch_of(made)) != seen


def test_a_few_heavy_weights_do_not_hide_light_ones() -> None:
    weights = torch.ones(100_001)
    weights[0] = 1e5
    seen = Counter(epoch_of(sampler(100_001, 1000, weights=weights, num_samples=10_000)))
    assert 4700 < seen[0] < 5300
    assert len(seen) > 4500


def test_draws_without_replacement_take_heavy_ones_early_and_none_twice() -> None:
    weights = [0.0, 1.0, 1.0, 8.0]
    firsts: Counter[int] = Counter()
    for seed in range(2000):
        drawn = epoch_of(sampler(4, 2, weights=weights, replacement=False, num_samples=2, seed=seed))
        assert len({*drawn}) == 2
        assert 0 not in drawn
        firsts[drawn[0]] += 1
    assert abs(firsts[3] - 1600) < 90  # 5 standard deviations
    assert len(epoch_of(sampler(4, 2, weights=weights, replacement=False))) == 3


def test_weighted_orders_never_change() -> None:
    weights = [1.0, 2.0, 3.0, 4.0]
    assert epoch_of(sampler(4, 4, weights=weights, num_samples=8)) == [3, 2, 2, 3, 2, 0, 1, 0]
    assert epoch_of(sampler(4, 4, weights=weights, replacement=False)) == [3, 2, 0, 1]


def order_of(made: ResumableSampler) -> str:
    return str(made.state_dict()["order"])


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize(
    "as_given",
    [
        list,
        tuple,
        np.array,
        lambda values: torch.tensor(values, dtype=torch.float64),
        lambda values: torch.tensor(values, dtype=torch.float64, requires_grad=True),
        lambda values: [torch.tensor(value, dtype=torch.float64) for value in values],
        lambda values: [-0.0 if value == 0 else value for value in values],
    ],
)
def test_weights_are_float64_however_they_are_given(as_given: Any, replacement: bool) -> None:
    values = [0.0, *(random.Random(1).random() for _ in range(500))]
    expected = epoch_of(sampler(501, weights=values, replacement=replacement))
    name = order_of(sampler(501, weights=values, replacement=replacement))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        made = sampler(501, weights=as_given(values), replacement=replacement)
        assert epoch_of(made) == expected
        assert order_of(made) == name
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("element", [0, 17, 39])
def test_one_other_weight_is_refused_within_an_epoch(element: int, replacement: bool) -> None:
    weights = torch.rand(40, dtype=torch.float64)
    saved = {**sampler(weights=weights, replacement=replacement).state_dict(), "samples_in_epoch": 16}
    made = sampler(weights=weights.clone(), replacement=replacement)
    made.load_state_dict(saved)
    weights[element] = torch.nextafter(weights[element], torch.ones_like(weights[element]))
    assert made.state_dict() == saved  # the sampler has a copy
    with pytest.raises(ValueError, match=r"of weights [0-9a-f]{12}' and is 'drawn"):
        sampler(weights=weights, replacement=replacement).load_state_dict(saved)


def test_another_order_of_a_function_is_refused_within_an_epoch() -> None:
    orders = {seed: torch.randperm(5000, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)}
    saved = {**sampler(5000, order=lambda _: orders[1]).state_dict(), "samples_in_epoch": 16}
    sampler(5000, order=lambda _: orders[1].tolist()).load_state_dict(saved)
    with pytest.raises(ValueError, match="function of indices"):
        sampler(5000, order=lambda _: orders[2]).load_state_dict(saved)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"weights": [1.0] * 40}, "drawn/1"),
        ({"weights": [1.0] * 40, "replacement": False}, "drawn without replacement/1"),
        ({"order": lambda _: range(40)}, "function"),
    ],
)
def test_a_state_without_a_digest_is_accepted(options: dict[str, Any], name: str) -> None:
    made = sampler(**options)
    made.load_state_dict({**made.state_dict(), "samples_in_epoch": 16, "order": name})
    assert made.samples_in_epoch == 16


@pytest.mark.parametrize("light", [1e-50, 1e-300, 5e-324])
def test_light_weights_come_last_and_those_of_0_never(light: float) -> None:
    weights = [0.0, light, *[1.0] * 13, 0.0]
    assert epoch_of(sampler(16, weights=weights, replacement=False))[-1] == 1


# The rank.


def test_a_rank_is_asked_for_when_batches_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ResumableSampler(24, 8, shuffle=False)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert (made.rank, made.world_size) == (1, 2)
    assert epoch_of(made) == [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23]


@pytest.mark.parametrize("draw", [list, lambda made: list(made.loader(range(24)))])
@pytest.mark.parametrize("size", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_a_launched_process_without_a_group_draws_nothing(
    draw: Any, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(size, "2")
    made = ResumableSampler(24, 8)
    assert len(made) == 3
    with pytest.raises(RuntimeError, match=rf"one of 2 \({size}\), but there is no process group.*rank=0"):
        draw(made)
    assert epoch_of(ResumableSampler(24, 8, shuffle=False, rank=0, world_size=1)) == [*range(24)]
    monkeypatch.setenv(size, "1")
    assert len(epoch_of(made)) == 24


# What counts.


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_count_when_they_are_handed_out(workers: int) -> None:
    made = sampler()
    loader = made.loader(range(40), num_workers=workers, **({"prefetch_factor": 4} if workers else {}))
    batches = iter(loader)
    for count in range(1, 6):
        next(batches)
        assert made.samples_in_epoch == 8 * count
    assert (made.epoch, made.state_dict()["samples_in_epoch"]) == (0, 40)
    assert next(batches, None) is None
    assert (made.epoch, made.samples_in_epoch) == (1, 0)


def test_a_step_counts_with_its_last_micro_batch() -> None:
    made = sampler(micro_batches=3, rank=1, world_size=2)
    loader = made.loader(range(40))
    assert len(loader) == 15
    counted = [made.samples_in_epoch for _ in loader]
    assert counted == [0, 0, 8, 8, 8, 16, 16, 16, 24, 24, 24, 32, 32, 32, 40]


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_a_loop_that_was_left_is_continued_by_the_next(options: dict[str, Any]) -> None:
    whole = epoch_of(sampler())
    made = sampler()
    loader = made.loader(range(40), **options)
    found = []
    for stop in (8, 24, 1000):
        for batch in loader:
            found += batch.tolist()
            if made.samples_in_epoch == stop:
                break
    assert found == whole
    assert made.epoch == 1
    assert sorted(each for batch in loader for each in batch.tolist()) == [*range(40)]


def test_an_older_iterator_ends_when_a_newer_one_counts() -> None:
    made = sampler()
    loader = made.loader(range(40))
    older = iter(loader)
    next(older)
    newer = iter(loader)
    with pytest.raises(RuntimeError, match="a newer one counts now"):
        next(older)
    next(newer)
    assert made.samples_in_epoch == 16
    made.load_state_dict(made.state_dict())
    with pytest.raises(RuntimeError, match="the position was set"):
        next(newer)


def test_workers_leave_the_trainers_generator_alone() -> None:
    before = torch.get_rng_state()
    for workers in (0, 2):
        epoch_of(sampler(), num_workers=workers)
    assert torch.equal(torch.get_rng_state(), before)


class Augmented(Dataset[torch.Tensor]):
    """Elements with noise from the generators of torch, Python and numpy."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(()).item(), random.random(), np.random.rand()])


def test_random_augmentation_is_the_same_on_any_number_of_ranks_and_workers() -> None:
    def rows(ranks: int, workers: int) -> list[tuple[float, ...]]:
        random.seed(ranks)
        torch.manual_seed(ranks)
        made = [sampler(24, rank=rank, world_size=ranks) for rank in range(ranks)]
        parts = [[*each.loader(Augmented(), num_workers=workers)] for each in made]
        return [tuple(row.tolist()) for step in zip(*parts, strict=True) for part in step for row in part]

    whole = rows(1, 0)
    assert len({row[1:] for row in whole}) == 24
    assert rows(3, 0) == whole
    assert rows(2, 2) == whole


def test_samples_need_not_be_seeded() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    [*sampler(24).loader(Augmented(), seed_samples=False)]
    assert not torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 1), (2, 1), (3, 2), (8, 3)])
def test_weights_give_the_gradient_of_the_global_batch(ranks: int, micro_batches: int) -> None:
    """13 samples in steps of 8: the last one has fewer samples than some have parts."""
    data = torch.arange(13.0)
    made = [
        sampler(13, shuffle=False, rank=rank, world_size=ranks, micro_batches=micro_batches) for rank in range(ranks)
    ]
    gradients = torch.zeros(2)
    for each in made:
        loader = each.loader(data)
        for number, batch in enumerate(loader):
            gradients[number // micro_batches] += loader.weight * batch.square().mean() / ranks
    assert torch.allclose(gradients, torch.stack([data[:8].square().mean(), data[8:].square().mean()]))


# A plain DataLoader.


@pytest.mark.parametrize("workers", [0, 2])
def test_a_plain_data_loader_is_counted_by_hand(workers: int) -> None:
    made, whole = sampler(), epoch_of(sampler())
    loader: DataLoader[Any] = DataLoader(torch.arange(40), batch_sampler=made, num_workers=workers)
    found = []
    for batch in loader:
        found += batch.tolist()
        made.advance()
        if made.samples_in_epoch == 16:
            break
    again = sampler()
    again.load_state_dict(made.state_dict())
    loader = DataLoader(torch.arange(40), batch_sampler=again, num_workers=workers)
    for batch in loader:
        found += batch.tolist()
        again.advance()
    assert found == whole
    assert (again.epoch, again.samples_in_epoch) == (0, 40)
    with pytest.raises(RuntimeError, match="epoch 0 has ended: all of its 40 samples"):
        again.advance()
    assert sum(map(len, loader)) == 40  # the next epoch
    assert again.epoch == 1


def test_what_the_loader_counts_is_not_counted_by_hand() -> None:
    made = sampler()
    for _ in made.loader(range(40)):
        with pytest.raises(RuntimeError, match="do not call advance"):
            made.advance()
        break
    made.advance()  # the loop has ended


# Ends and begins of epochs.


def test_the_end_of_an_epoch_is_told_from_the_begin_of_the_next() -> None:
    """A job that saved in the last step resumes with what comes after the epoch's loop; one that saved later, not."""
    made = sampler()
    states = [made.state_dict() for _ in made.loader(range(40))]
    in_last_step, after = states[-1], made.state_dict()
    assert (in_last_step["epoch"], in_last_step["samples_in_epoch"]) == (0, 40)
    assert (after["epoch"], after["samples_in_epoch"]) == (1, 0)
    resumed = sampler()
    resumed.load_state_dict(in_last_step)
    assert [*resumed.loader(range(40))] == []
    assert resumed.state_dict() == after


def test_set_epoch_keeps_the_position_of_the_current_epoch() -> None:
    made = sampler()
    made.load_state_dict({**made.state_dict(), "epoch": 2, "samples_in_epoch": 16})
    made.set_epoch(2)
    assert made.samples_in_epoch == 16
    made.set_epoch(3)
    assert (made.epoch, made.samples_in_epoch) == (3, 0)


@pytest.mark.parametrize(("drop_last", "batches"), [(True, 5), (False, 6)])
def test_the_length_is_that_of_a_whole_epoch(drop_last: bool, batches: int) -> None:
    made = sampler(43, drop_last=drop_last)
    loader = made.loader(range(43))
    assert len(loader) == len(made) == batches
    next(iter(loader))
    assert len(loader) == batches
    assert made.epoch == 0


@pytest.mark.parametrize("length", [0, 1, 7])
@pytest.mark.parametrize("ranks", [1, 3])
def test_data_sets_smaller_than_a_global_batch(length: int, ranks: int) -> None:
    for drop_last in (True, False):
        steps = []
        for rank in range(ranks):
            made = sampler(length, rank=rank, world_size=ranks, drop_last=drop_last)
            steps.append(len([*made.loader(range(length))]))
            assert made.epoch == 1
        assert steps == [int(length > 0 and not drop_last)] * ranks


# Resuming.


def test_the_global_batch_may_have_another_size_after_a_resume() -> None:
    whole = epoch_of(sampler())
    made = sampler(global_batch_size=6)
    batches = iter(made.loader(range(40)))
    found = [each for _ in range(3) for each in next(batches).tolist()]
    resumed = sampler(global_batch_size=10)
    resumed.load_state_dict(made.state_dict())
    assert found + epoch_of(resumed) == whole


def test_a_loader_has_the_state_of_its_sampler() -> None:
    made, other = sampler(), sampler()
    loader = made.loader(range(40))
    next(iter(loader))
    again = other.loader(range(40))
    again.load_state_dict(loader.state_dict())
    assert other.state_dict() == made.state_dict() == loader.state_dict()


def test_the_saved_seed_counts() -> None:
    made, resumed = sampler(seed=8), sampler(seed=9)
    resumed.load_state_dict(made.state_dict())
    assert resumed.seed == 8
    assert epoch_of(resumed) == epoch_of(made)


def test_state_is_plain_and_the_same_on_all_ranks() -> None:
    states = [sampler(rank=rank, world_size=3, micro_batches=2).state_dict() for rank in range(3)]
    assert states[0] == states[1] == states[2]
    assert states[0] == {
        "epoch": 0,
        "samples_in_epoch": 0,
        "seed": 0,
        "dataset_length": 40,
        "samples_per_epoch": 40,
        "order": "shuffled/1",
    }


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"length": 50}, "dataset_length was 40 and is 50; samples_per_epoch was 40 and is 50"),
        ({"shuffle": False}, "order was 'shuffled/1' and is 'sequential'"),
        ({"weights": torch.ones(40)}, "order was 'shuffled/1' and is 'drawn/1 of weights "),
        ({"weights": torch.ones(40), "replacement": False}, "is 'drawn without replacement/1 of weights "),
        (
            {"order": lambda epoch: range(30)},
            "samples_per_epoch was 40 and is 30; order was 'shuffled/1' and is 'function of indices ",
        ),
    ],
)
def test_a_position_in_other_data_is_refused_within_an_epoch_alone(other: dict[str, Any], message: str) -> None:
    saved = {**sampler().state_dict(), "epoch": 3, "samples_in_epoch": 16, "seed": 5}
    made = sampler(**other)
    before = made.state_dict()
    with pytest.raises(ValueError, match="after 16 samples of epoch 3") as raised:
        made.load_state_dict(saved)
    assert message in str(raised.value)
    assert "set_epoch(4)" in str(raised.value)
    assert made.state_dict() == before
    made.load_state_dict({**saved, "samples_in_epoch": 0})
    assert made.epoch == 3


# What cannot be.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch_size": 0}, "global_batch_size=0"),
        ({"micro_batches": 0}, "micro_batches=0"),
        ({"rank": 2, "world_size": 2}, "rank=2 is not one of world_size=2"),
        ({"rank": 0, "world_size": None}, "belong together"),
        ({"weights": [1.0] * 39}, "weights has shape (39,), but the data set has 40"),
        ({"weights": [-1.0] + [1.0] * 39}, "weights must be finite"),
        ({"weights": [0.0] * 40}, "not all 0"),
        ({"weights": [1e308] * 40}, "sum of the weights is inf"),
        ({"weights": [1e-310] * 40}, "multiply all weights"),
        ({"weights": [1.0] * 40, "order": range}, "order= and weights="),
        ({"num_samples": 3}, "are for weights="),
        ({"replacement": False}, "are for weights="),
        ({"weights": [0.0, 1.0] * 20, "replacement": False, "num_samples": 21}, "num_samples=21 cannot be drawn"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        sampler(**options)


@pytest.mark.parametrize("option", ["batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"])
def test_options_of_the_data_loader_that_the_sampler_decides_are_refused(option: str) -> None:
    with pytest.raises(TypeError, match=f"{option}= is decided by the ResumableSampler"):
        sampler().loader(range(40), **{option: 2})


def test_a_loader_out_of_order_is_refused() -> None:
    with pytest.raises(TypeError, match="in_order=False"):
        sampler().loader(range(40), in_order=False)


def test_another_data_set_is_refused() -> None:
    with pytest.raises(ValueError, match="for 40 elements, but the data set has 41"):
        sampler().loader(range(41))


def test_a_negative_epoch_is_refused() -> None:
    with pytest.raises(ValueError, match="epoch=-1"):
        sampler().set_epoch(-1)
