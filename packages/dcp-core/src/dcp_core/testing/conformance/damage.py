"""Tests with damaged and malicious checkpoints: loads are correct or raise, and run no code."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from dcp_core.errors import CheckpointNotFoundError, CorruptCheckpointError, DcpError
from dcp_core.testing.conformance.folder import Door, RawFolder, StorageFixtures
from dcp_core.testing.conformance.states import blank, random_state
from dcp_core.testing.trees import same

__all__ = ["DamageTests"]

_PLACES = 24


class DamageTests(StorageFixtures):
    """Tests of loads after files were changed."""

    def test_missing_data_is_named(self, storage: Door, raw: RawFolder) -> None:
        storage.save(random_state())
        for name, keys in self.data_files(storage.checkpoint_id).items():
            content = raw.get(name)
            raw.delete(name)
            with pytest.raises(CheckpointNotFoundError) as caught:
                storage.load(blank(random_state()))
            assert name in str(caught.value)
            assert any(key in str(caught.value) for key in keys)
            raw.put(name, content)
        assert attempt(storage) is None

    @pytest.mark.parametrize("part", [0.0, 0.3, 0.6, 0.9])
    def test_truncated_data_is_refused(self, storage: Door, raw: RawFolder, part: float) -> None:
        storage.save(random_state())
        name, keys = self.largest_data_file(storage, raw)
        content = raw.get(name)
        raw.put(name, content[: int(len(content) * part)])
        assert_refused(attempt(storage), name, keys)

    def test_data_without_its_last_byte_is_refused_or_right(self, storage: Door, raw: RawFolder) -> None:
        storage.save(random_state())
        name, keys = self.largest_data_file(storage, raw)
        raw.put(name, raw.get(name)[:-1])
        error = attempt(storage)
        if error is not None:
            assert_refused(error, name, keys)

    def test_flipped_bits_of_data_are_refused(self, storage: Door, raw: RawFolder) -> None:
        storage.save(random_state())
        name, keys = self.largest_data_file(storage, raw)
        errors = [attempt(storage) for _ in flips(raw, name)]
        for error in errors:
            if error is not None:
                assert_refused(error, name, keys)
        # Nearly all of these bytes are values; a load may ignore the few bytes of headers.
        assert sum(error is not None for error in errors) > _PLACES * 3 // 4
        assert attempt(storage) is None

    def test_data_of_another_save_is_refused(self, storage: Door, raw: RawFolder) -> None:
        storage.save(random_state(seed=1))
        other = raw.get(self.largest_data_file(storage, raw)[0])
        storage.save(random_state())
        name, keys = self.largest_data_file(storage, raw)
        assert len(raw.get(name)) == len(other)
        raw.put(name, other)
        assert_refused(attempt(storage), name, keys)

    def test_flipped_bits_of_the_index_never_lead_to_wrong_values(self, storage: Door, raw: RawFolder) -> None:
        storage.save(random_state())
        errors = []
        for name in self.index_files(storage.checkpoint_id, raw):
            errors += [attempt(storage) for _ in flips(raw, name)]
        assert any(error is not None for error in errors)
        assert attempt(storage) is None

    @pytest.mark.parametrize("part", [0.0, 0.1, 0.35, 0.6, 0.85, 1.0])
    def test_a_truncated_index_is_refused(self, storage: Door, raw: RawFolder, part: float) -> None:
        storage.save(random_state())
        for name in self.index_files(storage.checkpoint_id, raw):
            content = raw.get(name)
            raw.put(name, content[: min(int(len(content) * part), len(content) - 1)])
        assert isinstance(attempt(storage), CorruptCheckpointError)

    def test_without_its_index_a_checkpoint_does_not_exist(self, storage: Door, raw: RawFolder) -> None:
        storage.save(random_state())
        for name in self.index_files(storage.checkpoint_id, raw):
            raw.delete(name)
        assert isinstance(attempt(storage), CheckpointNotFoundError)

    @pytest.mark.parametrize("protocol", [2, 4])
    @pytest.mark.parametrize("keep_the_rest", [True, False])
    def test_a_hostile_index_does_not_run(
        self,
        storage: Door,
        raw: RawFolder,
        tmp_path: Path,
        keep_the_rest: bool,
        protocol: int,
    ) -> None:
        storage.save(random_state())
        attack = pickle.dumps(Hostile(tmp_path / "ran"), protocol)
        for name in self.index_files(storage.checkpoint_id, raw):
            raw.put(name, attack + raw.get(name) if keep_the_rest else attack)
        attempt(storage)
        assert keep_the_rest or attempt(storage) is not None
        assert not (tmp_path / "ran").exists()

    def test_a_hostile_object_does_not_run(self, storage: Door, tmp_path: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the save warns that the checkpoint cannot be loaded
            storage.save({"tensor": torch.ones(2), "attack": Hostile(tmp_path / "ran")})
        with pytest.raises(DcpError, match="attack"):
            storage.load({"tensor": torch.zeros(2), "attack": None})
        assert not (tmp_path / "ran").exists()

    def largest_data_file(self, storage: Door, raw: RawFolder) -> tuple[str, set[str]]:
        files = self.data_files(storage.checkpoint_id)
        name = max(files, key=lambda name: len(raw.get(name)))
        return name, files[name]


class Hostile:
    """Creates a directory when unpickled, to detect that code ran."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return os.mkdir, (str(self._path),)


def attempt(storage: Door) -> DcpError | None:
    """Return a load's exception, or None if all values are correct."""
    template = blank(random_state())
    try:
        storage.load(template)
    except DcpError as error:
        return error
    assert same(template, random_state()), "damage went unnoticed: wrong values were loaded"
    return None


def assert_refused(error: DcpError | None, name: str, keys: set[str]) -> None:
    """Assert that a message names the file and one of its FQNs."""
    assert isinstance(error, CorruptCheckpointError)
    assert error.file == name
    assert error.key in keys
    assert name in str(error)


def flips(raw: RawFolder, name: str) -> Iterator[int]:
    """Flip one byte at a time, yield its position, and restore the file."""
    content = raw.get(name)
    for number in range(_PLACES):
        place = len(content) * number // _PLACES + len(content) // (2 * _PLACES)
        damaged = bytearray(content)
        damaged[place] ^= 1 << number % 8
        raw.put(name, bytes(damaged))
        yield place
    raw.put(name, content)
