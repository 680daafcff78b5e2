"""Tests that loaded values equal saved values."""

from __future__ import annotations

import pytest

from dcp_core.loading import load_keys
from dcp_core.saving import save
from dcp_core.testing.conformance.folder import Door, RawFolder, StorageFixtures
from dcp_core.testing.conformance.states import VALUES, blank, state
from dcp_core.testing.trees import same

__all__ = ["RoundTripTests"]


class RoundTripTests(StorageFixtures):
    """Tests of a save and a load in one process."""

    @pytest.mark.parametrize("kind", VALUES)
    def test_a_value_comes_back(self, door: Door, raw: RawFolder, kind: str) -> None:
        value = VALUES[kind]()
        door.save({"value": value})
        template = {"value": blank(value)}
        report = door.load(template)
        assert same(template["value"], value)
        assert report.unverified == ()
        assert raw.names()

    def test_a_checkpoint_is_loaded_without_a_template(self, storage: Door) -> None:
        wanted = {"model": VALUES["many"](), "step": 3}
        storage.save(wanted)
        loaded = load_keys(storage_reader=self.make_reader(storage.checkpoint_id))
        assert same(loaded, wanted)

    def test_one_writer_and_one_reader_serve_many(self, checkpoint_id: str) -> None:
        writer, reader = self.make_writer(checkpoint_id), self.make_reader(checkpoint_id)
        for value in (1.0, 2.0):
            save(state(value), checkpoint_id=checkpoint_id, storage_writer=writer)
            template = blank(state(value))
            Door(checkpoint_id, None, lambda _: reader).load(template)
            assert same(template, state(value))

    def test_ids_of_other_storages_are_not_claimed(self, checkpoint_id: str) -> None:
        for storage in (self.make_writer(checkpoint_id), self.make_reader(checkpoint_id)):
            assert storage.validate_checkpoint_id(checkpoint_id)
            assert not storage.validate_checkpoint_id("no-such-scheme://somewhere/checkpoint")

    def test_readers_and_writers_touch_nothing_until_they_are_used(self, checkpoint_id: str, raw: RawFolder) -> None:
        self.make_writer(checkpoint_id).reset(checkpoint_id)
        self.make_reader(checkpoint_id).reset(checkpoint_id)
        assert raw.names() == []
