"""The choice of `compression="adaptive"`: from the rate of the storage and the samples; in doubt not compressed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from dcp_core.encoding import adaptive
from dcp_core.encoding.adaptive import AdaptiveChoice, adaptive_requests, forget_rates
from dcp_core.encoding.compression import CompressionPolicy
from dcp_io.requests import Payload, WriteRequest
from dcp_manifest.index.items import Framing

MIB = 1 << 20
PLACE = "/checkpoints/step-"


class Clock:
    """Time that passes only while blocks are encoded."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Halving:
    """Encoder that halves, at a rate."""

    block_bytes = MIB
    descriptors = ("block.half/1",)

    def __init__(self, clock: Clock, rate: float) -> None:
        self._clock, self._rate = clock, rate

    def encode(self, block: memoryview) -> bytes:
        self._clock.now += len(block) / self._rate
        return bytes(len(block) // 2)


class Policy(CompressionPolicy):
    """Applies `Halving` to everything, or to nothing."""

    def __init__(self, encoder: Halving | None) -> None:
        super().__init__(None)
        self._encoder = encoder

    def apply(self, key: str, payload: Payload) -> Payload:
        return replace(payload, blocks=self._encoder)


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    forget_rates()
    yield
    forget_rates()


@pytest.fixture
def choice(monkeypatch: pytest.MonkeyPatch) -> Callable[..., AdaptiveChoice]:
    clock = Clock()
    monkeypatch.setattr(adaptive, "time", clock)

    def make(nbytes: int = 1 << 30, *, encode: float | None = 1e9 / 0.6, step: str = "1") -> AdaptiveChoice:
        policy = Policy(None if encode is None else Halving(clock, encode))
        return AdaptiveChoice(policy, PLACE + step, nbytes, 1)

    return make


def _payload() -> Payload:
    return Payload(bytes(MIB), Framing.RAW, "uint8", (MIB,))


def _is_encoded(choice: AdaptiveChoice) -> bool:
    return choice.apply("a", _payload()).blocks is not None


@pytest.mark.parametrize(("storage", "compressed"), [(1e8, True), (7e8, True), (9e8, False), (2e9, False)])
def test_a_first_save_measures_and_chooses(choice: Callable[..., Any], storage: float, compressed: bool) -> None:
    """At 1 GB/s to a half: max(1, storage / 2) + a quarter of the shorter one, against 1 ÷ rate of the storage."""
    made = choice()
    made.begin(1)
    assert made.file_bytes == 64 * MIB
    assert not _is_encoded(made)
    assert made.compresses is None
    made.note(64 * MIB, 0.001, 64 * MIB / storage)
    assert made.compresses is compressed
    assert _is_encoded(made) is compressed
    assert made.report.startswith("compressed" if compressed else "not compressed")
    assert f"{storage / 1e6:,.0f} MB/s (the first 64 MiB)" in made.report


def test_several_files_add_up(choice: Callable[..., Any]) -> None:
    made = choice()
    made.begin(2)
    _is_encoded(made)
    made.note(32 * MIB, 0, 32 * MIB / 1e8)
    assert made.compresses is None
    made.note(32 * MIB, 0, 32 * MIB / 2e8)
    assert "300 MB/s" in made.report


def test_a_small_first_save_is_not_compressed_and_the_next_one_knows(choice: Callable[..., Any]) -> None:
    first = choice(100 * MIB)
    first.begin(1)
    assert first.file_bytes is None
    assert not _is_encoded(first)
    assert "less than 256 MiB" in first.report
    first.close(0.8)
    first.end(100 * MIB, 1.0)
    later = choice(100 * MIB, step="2")
    later.begin(1)
    assert _is_encoded(later)
    assert "105 MB/s (the last save)" in later.report


def test_the_last_save_counts_and_not_an_older_one(choice: Callable[..., Any]) -> None:
    for seconds, compressed in ((10.0, False), (0.5, True), (10.0, False)):
        made = choice()
        made.begin(1)
        found = _is_encoded(made)
        assert found is compressed
        made.close(0.8 * seconds)
        made.end(1 << 30, seconds)


def test_another_place_is_another_storage(choice: Callable[..., Any]) -> None:
    first = choice()
    first.begin(1)
    first.end(1 << 30, 10.0)
    other = AdaptiveChoice(Policy(None), "/elsewhere/step-1", 1 << 30, 1)
    assert other.measures
    assert not choice().measures


def test_a_save_that_compression_held_up_says_nothing_of_the_storage(choice: Callable[..., Any]) -> None:
    made = choice()
    made.begin(1)
    _is_encoded(made)
    made.note(64 * MIB, 0, 64 * MIB / 5e8)
    encoder = made.apply("a", _payload()).blocks
    for _ in range(1024):
        encoder.encode(memoryview(bytes(MIB)))
    made.close(0.1)
    made.end(1 << 29, 1.1)
    assert choice().measures


def test_a_save_that_the_storage_held_up_is_compressed_again(choice: Callable[..., Any]) -> None:
    made = choice()
    made.begin(1)
    _is_encoded(made)
    made.note(64 * MIB, 0, 64 * MIB / 1e8)
    encoder = made.apply("a", _payload()).blocks
    for _ in range(1024):
        encoder.encode(memoryview(bytes(MIB)))
    made.close(4.2)
    made.end(1 << 29, 5.4)
    later = choice(step="2")
    later.begin(1)
    assert later.compresses
    assert "99 MB/s (the last save)" in later.report


def test_where_the_processor_is_what_takes_time_nothing_is_compressed(choice: Callable[..., Any]) -> None:
    first = choice()
    first.begin(1)
    _is_encoded(first)
    first.note(64 * MIB, 0.7, 0.1)
    assert first.compresses is False
    assert "hardly wait for the storage, at 96 MB/s (the first 64 MiB)" in first.report
    first.close(1.0)
    first.end(1 << 30, 10.0)
    later = choice(step="2")
    later.begin(1)
    assert later.compresses is False


def test_what_does_not_shrink_is_not_compressed(choice: Callable[..., Any]) -> None:
    made = choice(encode=None)
    made.begin(1)
    assert not _is_encoded(made)
    made.note(64 * MIB, 0, 10.0)
    assert not made.compresses
    assert "do not shrink" in made.report


def _requests(sizes: Sequence[int]) -> list[Any]:
    return [WriteRequest(str(size), size, _payload) for size in sizes]


def test_a_save_that_measures_begins_with_smaller_items(choice: Callable[..., Any]) -> None:
    sizes = [500 * MIB, 100, *[8 * MIB] * 40]
    found = adaptive_requests(_requests(sizes), choice())
    urgent = [each.cost_bytes for each in found if getattr(each, "urgent", False)]
    assert set(urgent) == {8 * MIB}
    assert 64 * MIB <= sum(urgent) < 320 * MIB
    assert not any(getattr(each, "urgent", False) for each in adaptive_requests(_requests(sizes), choice(MIB)))
    assert [each.cost_bytes for each in found] == sizes


def test_adaptive_is_a_setting_of_a_whole_save() -> None:
    assert CompressionPolicy("adaptive").adapts
    assert not CompressionPolicy("auto").adapts
    with pytest.raises(ValueError, match="give it alone"):
        CompressionPolicy({"a": "adaptive"})
