"""Saves with `compression="adaptive"` to storages whose rates a test sets: what is chosen, and how mistakes end."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_core import ByteStorageReader, ByteStorageWriter, load, save
from dcp_core.encoding.compression import CompressionPolicy
from dcp_io import LocalStore, StoreBackend
from dcp_manifest.index.stored_items import StoredItems
from dcp_transforms import adaptive
from dcp_transforms.adaptive import AdaptiveCompression, _Place

MIB = 1 << 20


class Clock:
    """Time that passes only as the simulated storage takes it."""

    def __init__(self) -> None:
        self.now, self.storage, self.encode, self.sample_seconds = 0.0, 1e12, 1e12, 0.0

    def perf_counter(self) -> float:
        self.now += self.sample_seconds
        return self.now


class SimulatedBackend(StoreBackend):
    """A backend that writes files, and takes the time of a storage and of an encoder with the rates of the clock."""

    clock = Clock()

    def write(self, requests: Any, *, prefix: str, save_id: str) -> StoredItems:
        stored = super().write(requests, prefix=prefix, save_id=save_id)
        self.clock.now += int(stored.columns.length.sum()) / self.clock.storage
        if stored.columns.chain.any():
            self.clock.now += sum(request.cost_bytes for request in requests) / self.clock.encode
        return stored


class FolderWriter(ByteStorageWriter):
    def _open(self, checkpoint_id: Any) -> StoreBackend:
        return SimulatedBackend(LocalStore(checkpoint_id), layout="raw", threads=2)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class FolderReader(ByteStorageReader):
    def _open(self, checkpoint_id: Any) -> StoreBackend:
        return StoreBackend(LocalStore(checkpoint_id))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(SimulatedBackend, "clock", made)
    monkeypatch.setattr(adaptive, "time", made)
    monkeypatch.setattr(adaptive, "_MIN_SAVE_BYTES", MIB)
    monkeypatch.setattr(adaptive, "_places", {})
    return made


def _state() -> dict[str, torch.Tensor]:
    maker = torch.Generator().manual_seed(0)
    state = {f"w{n}": (torch.randn(MIB // 8, generator=maker) * 0.02).bfloat16() for n in range(8)}
    return {**state, "turned": state["w0"].reshape(256, -1).clone().t(), "small": torch.ones(3)}


def _saved(folder: Path, state: dict[str, torch.Tensor] | None = None) -> int:
    """The number of compressed items; all come back as they were."""
    state = _state() if state is None else state
    save(state, storage_writer=FolderWriter(str(folder), compression="adaptive"), no_dist=True)
    found = {key: torch.zeros_like(value) for key, value in state.items()}
    load(found, storage_reader=FolderReader(str(folder)), no_dist=True)
    assert all(torch.equal(found[key], value) for key, value in state.items())
    stored = FolderReader(str(folder)).read_metadata().storage_data
    return sum(bool(place.transform_descriptors) for place in stored.values())


ALL = len(_state()) - 1


def test_a_first_save_is_plain_and_later_ones_to_a_slow_storage_are_compressed(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    clock.storage = 1e6
    with caplog.at_level(logging.INFO, "dcp_transforms.adaptive"):
        assert [_saved(tmp_path / f"step-{n}") for n in range(3)] == [0, ALL, ALL]
    first, second = [record.getMessage() for record in caplog.records]
    assert first == f"saves to {tmp_path} are not compressed: the rate of the storage is not known yet"
    assert second.startswith(f"saves to {tmp_path} are compressed: plain saves made 1 MB/s; by samples, ")


def test_another_parent_folder_is_another_place(tmp_path: Path, clock: Clock) -> None:
    clock.storage = 1e6
    assert [_saved(tmp_path / name) for name in ("a/1", "b/1", "a/2", "b/2")] == [0, 0, ALL, ALL]


def test_a_wrong_estimate_is_corrected_after_one_save(tmp_path: Path, clock: Clock) -> None:
    """The samples cost nothing, the encoder of the save as much as three times the storage."""
    clock.storage, clock.encode = 1e6, 0.33e6
    assert [_saved(tmp_path / f"step-{n}") for n in range(5)] == [0, ALL, 0, 0, 0]


@pytest.mark.parametrize(("slowdown", "compressed"), [(1.0, ALL), (20.0, 0)])
def test_a_busy_processor_is_noticed(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, slowdown: float, compressed: int
) -> None:
    monkeypatch.setattr(adaptive, "_slowdown", lambda: slowdown)
    clock.storage, clock.sample_seconds = 1e6, 0.03  # for 256 KiB
    assert [_saved(tmp_path / f"step-{n}") for n in range(2)] == [0, compressed]


def test_the_slowdown_of_a_thread_is_at_least_1() -> None:
    assert adaptive._slowdown() >= 1


def test_a_storage_that_becomes_faster_is_noticed_after_eight_saves(tmp_path: Path, clock: Clock) -> None:
    clock.storage, clock.encode = 1e6, 2e7
    assert [_saved(tmp_path / f"step-{n}") for n in range(3)] == [0, ALL, ALL]
    clock.storage = 1e9
    found = [_saved(tmp_path / f"step-{n}") for n in range(3, 14)]
    assert found == [ALL] * 6 + [0] * 5


def test_a_storage_that_becomes_slower_is_noticed_after_three_saves(tmp_path: Path, clock: Clock) -> None:
    clock.storage, clock.encode = 1e9, 1e7
    adaptive._places[str(tmp_path)] = _Place(compressed=0.9e7)
    assert [_saved(tmp_path / f"step-{n}") for n in range(2)] == [0, 0]
    clock.storage = 1e6
    assert [_saved(tmp_path / f"step-{n}") for n in range(2, 6)] == [0, 0, 0, ALL]


def test_small_saves_and_values_that_do_not_shrink_are_plain(tmp_path: Path, clock: Clock) -> None:
    clock.storage = 1e6
    small = {"x": torch.zeros(MIB // 8)}
    noise = {"x": torch.randint(0, 256, (2 * MIB,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))}
    assert [_saved(tmp_path / "small" / f"{n}", small) for n in range(3)] == [0, 0, 0]
    assert [_saved(tmp_path / "noise" / f"{n}", noise) for n in range(3)] == [0, 0, 0]


def test_a_failed_save_says_nothing_of_its_place(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "step-1").write_text("no folder")
    with pytest.raises(OSError, match="step-1"):
        _saved(tmp_path / "step-1")
    assert not any(place.plain for place in adaptive._places.values())


@pytest.mark.parametrize(
    ("place", "compresses"),
    [
        ((), False),
        (([1e8],), False),
        (([1e8], None, 0.5 / 1e8, 0.7), True),  # 0.7 + 0.25 × 0.5
        (([1e8], None, 0.9 / 1e8, 0.7), False),  # 0.9 + 0.25 × 0.7
        (([1e8], None, 0.0, 0.96), False),
        (([1e8], 1.1e8, 9.0, 1.0), True),
        (([1e8], 1.04e8, 0.0, 0.1), False),
        (([1e8, 2e8, 1e8], 1.5e8), False),
        (([1e8], 1.5e8, 0.0, 1.0, 7), True),
        (([1e8], 1.5e8, 0.0, 1.0, 8), False),
    ],
)
def test_the_faster_kind_is_chosen_and_in_doubt_the_plain_one(place: tuple[Any, ...], compresses: bool) -> None:
    plain, *rest = place or ([],)
    made = _Place(adaptive.deque(plain), *rest)
    assert made.choose()[0] is compresses


def test_samples_are_evenly_spaced_in_bytes() -> None:
    class Request:
        def __init__(self, cost_bytes: int) -> None:
            self.cost_bytes = cost_bytes

    def weights(*sizes: int) -> dict[int, int]:
        found = adaptive._samples(CompressionPolicy(None), [Request(size) for size in sizes], sum(sizes))  # type: ignore[misc]
        return {position: sample.weight for position, sample in found.items()}

    assert weights(MIB) == {0: 1}
    assert weights(6 * MIB, 1, MIB, MIB) == {0: 6, 2: 1, 3: 1}
    assert weights(*[MIB] * 80) == {10 * n + 5: 1 for n in range(8)}


def test_the_name_is_a_setting_of_whole_saves() -> None:
    assert isinstance(FolderWriter("a", compression="adaptive")._compression, AdaptiveCompression)
    for setting in ("adaptive", {"a": "adaptive"}):
        with pytest.raises(ValueError, match="pass it alone, to a storage writer"):
            CompressionPolicy(setting)
