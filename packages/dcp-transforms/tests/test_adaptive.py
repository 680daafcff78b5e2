"""Whole saves with `compression="adaptive"`, to a storage that is slow or fast when bytes become durable."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_core import ByteStorageReader, ByteStorageWriter, load, plugins, save
from dcp_core.encoding import adaptive
from dcp_core.encoding.adaptive import AdaptiveChoice
from dcp_core.hookspecs import CheckpointEvent, hookimpl
from dcp_io import LocalStore, StoreBackend

NBYTES = 16 << 20


class FolderWriter(ByteStorageWriter):
    def _open(self, checkpoint_id: Any) -> StoreBackend:
        return StoreBackend(LocalStore(checkpoint_id), layout="raw")

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
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(adaptive, "_PROBE_BYTES", NBYTES // 8)
    monkeypatch.setattr(adaptive, "_PROBED_SAVE_BYTES", NBYTES // 2)
    monkeypatch.setattr(adaptive, "_RATED_BYTES", NBYTES // 2)
    adaptive.forget_rates()
    yield
    adaptive.forget_rates()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let the storage seem to make bytes durable at this rate, bytes per second."""
    rates: list[float] = []
    note, end = AdaptiveChoice.note, AdaptiveChoice.end

    def note_at_rate(self: AdaptiveChoice, nbytes: int, write_seconds: float, sync_seconds: float) -> None:
        note(self, nbytes, 0.0, nbytes / rates[-1])

    def end_at_rate(self: AdaptiveChoice, stored_bytes: int, seconds: float) -> None:
        self.close(stored_bytes / rates[-1] / 2)
        end(self, stored_bytes, stored_bytes / rates[-1])

    monkeypatch.setattr(AdaptiveChoice, "note", note_at_rate)
    monkeypatch.setattr(AdaptiveChoice, "end", end_at_rate)
    return rates.append


@pytest.fixture
def choices() -> Iterator[list[str]]:
    seen: list[str] = []

    class Recorder:
        @hookimpl
        def dcp_on_event(self, event: CheckpointEvent) -> None:
            if event.compression is not None:
                assert (event.phase, event.state) == ("write", "finished")
                seen.append(event.compression)

    plugins.register(Recorder(), name="choices")
    yield seen
    plugins.unregister("choices")


def _state() -> dict[str, torch.Tensor]:
    maker = torch.Generator().manual_seed(0)
    return {f"w{n}": (torch.randn(NBYTES // 32, generator=maker) * 0.02).bfloat16() for n in range(16)}


def _saved(folder: Path, state: dict[str, torch.Tensor]) -> list[bool]:
    """Which items are compressed; all come back as they were."""
    writer = FolderWriter(str(folder), compression="adaptive")
    save(state, storage_writer=writer, no_dist=True)
    found = {key: torch.zeros_like(value) for key, value in state.items()}
    load(found, storage_reader=FolderReader(str(folder)), no_dist=True)
    assert all(torch.equal(found[key], value) for key, value in state.items())
    stored = FolderReader(str(folder)).read_metadata().storage_data
    return [bool(place.transform_descriptors) for place in stored.values()]


def test_a_slow_storage_is_found_in_the_first_save(
    tmp_path: Path, slow: Callable[[float], None], choices: list[str]
) -> None:
    slow(1e6)
    found = _saved(tmp_path / "step-1", _state())
    assert 8 <= sum(found) < 16
    assert all(_saved(tmp_path / "step-2", _state()))
    assert [text.partition(":")[0] for text in choices] == ["compressed", "compressed"]
    assert "(the first 2 MiB)" in choices[0]
    assert "(the last save)" in choices[1]


def test_a_fast_storage_gets_what_there_is(tmp_path: Path, slow: Callable[[float], None], choices: list[str]) -> None:
    slow(1e12)
    assert not any(_saved(tmp_path / "step-1", _state()))
    assert not any(_saved(tmp_path / "step-2", _state()))
    assert [text.partition(":")[0] for text in choices] == ["not compressed", "not compressed"]


def test_a_storage_that_becomes_slow_is_noticed(tmp_path: Path, slow: Callable[[float], None]) -> None:
    for step, (rate, compressed) in enumerate([(1e12, False), (1e6, False), (1e6, True)]):
        slow(rate)
        assert set(_saved(tmp_path / f"step-{step}", _state())) == {compressed}


def test_other_settings_report_no_choice(tmp_path: Path, choices: list[str]) -> None:
    writer = FolderWriter(str(tmp_path / "a"), compression="auto")
    save(_state(), storage_writer=writer, no_dist=True)
    assert writer.compression_choice is None
    assert not choices
