"""Tests of loads: missing checkpoints, partial reads, and loads during a save."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dcp_core.errors import CheckpointNotFoundError
from dcp_core.testing.conformance.background import Background
from dcp_core.testing.conformance.folder import Door, RawFolder, StorageFixtures
from dcp_core.testing.conformance.states import blank, state
from dcp_core.testing.trees import same

__all__ = ["ReadingTests"]

_SAVES = 12
_SLACK_BYTES = 256 << 10


class ReadingTests(StorageFixtures):
    """Tests of loads in one process."""

    def test_a_missing_checkpoint_is_named(self, door: Door, raw: RawFolder) -> None:
        folder = door.checkpoint_id.rstrip("/").rpartition("/")[2]
        with pytest.raises(CheckpointNotFoundError, match=folder):
            door.load(blank(state(1.0)))
        assert raw.names() == []

    def test_only_the_wanted_values_are_read(
        self, storage: Door, raw: RawFolder, bytes_given: Callable[[], int] | None
    ) -> None:
        storage.save({f"value{number}": torch.full((1 << 18,), float(number)) for number in range(8)})
        wanted_bytes = 2 << 20
        assert sum(len(raw.get(name)) for name in raw.names()) >= 4 * wanted_bytes
        before = bytes_given() if bytes_given is not None else 0
        template = {f"value{number}": torch.zeros(1 << 18) for number in (2, 5)}
        report = storage.load(template)
        given = bytes_given() - before if bytes_given is not None else report.bytes_read
        assert same(template, {f"value{number}": torch.full((1 << 18,), float(number)) for number in (2, 5)})
        assert report.unexpected == tuple(f"value{number}" for number in (0, 1, 3, 4, 6, 7))
        assert wanted_bytes <= report.bytes_read <= wanted_bytes + _SLACK_BYTES
        assert wanted_bytes <= given <= wanted_bytes + _SLACK_BYTES

    def test_readers_see_one_whole_checkpoint_while_it_is_replaced(self, storage: Door) -> None:
        storage.save(state(0.0))
        seen: list[float] = []

        def read() -> None:
            template = blank(state(0.0))
            storage.load(template)
            value = float(template["small"])
            assert same(template, state(value))
            seen.append(value)

        def look() -> None:
            metadata = self.make_reader(storage.checkpoint_id).read_metadata()
            assert metadata.state_dict_metadata.keys() == {"large", "small", "bytes", "object.value"}

        with Background(read, look) as readers:
            for number in range(1, _SAVES):
                loads = len(seen)
                storage.save(state(float(number)))
                # A load retries if its checkpoint was replaced, but not indefinitely.
                readers.wait_for(lambda loads=loads: len(seen) > loads)  # type: ignore[misc]
        assert seen == sorted(seen)
        assert len(set(seen)) >= _SAVES // 2
        template = blank(state(0.0))
        storage.load(template)
        assert same(template, state(float(_SAVES - 1)))
