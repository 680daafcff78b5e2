"""Tests of replacing a checkpoint: atomic, and without leftover files."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from dcp_core.errors import CheckpointNotFoundError, DcpError
from dcp_core.records.protocols import StorageWriter
from dcp_core.saving import save
from dcp_core.testing.conformance.folder import Door, RawFolder, StorageFixtures
from dcp_core.testing.conformance.states import FailingPlanner, blank, random_state, state
from dcp_core.testing.trees import same

__all__ = ["ResavingTests"]

_WAIT_TIMEOUT_SECONDS = 60.0


class ResavingTests(StorageFixtures):
    """Tests of saves to an existing checkpoint's id."""

    def test_saving_again_replaces(self, door: Door, raw: RawFolder) -> None:
        door.save(state(1.0))
        index = self.index_files(door.checkpoint_id, raw)
        for wanted in (state(2.0), random_state(), {"object": "alone"}, state(3.0)):
            before = {name: raw.get(name) for name in raw.names()}
            door.save(wanted)
            template = blank(wanted)
            door.load(template)
            assert same(template, wanted)
            assert self.index_files(door.checkpoint_id, raw) == index
            assert all(raw.get(name) != before.get(name) for name in raw.names())

    def test_a_failed_save_keeps_the_old_checkpoint(self, door: Door, raw: RawFolder) -> None:
        door.save(state(1.0))
        before = {name: raw.get(name) for name in raw.names()}
        with pytest.raises(DcpError, match="meant to fail"):
            door.save(state(2.0), planner=FailingPlanner())
        assert {name: raw.get(name) for name in raw.names()} == before
        self.assert_holds(door, state(1.0))
        door.save(state(3.0))
        self.assert_holds(door, state(3.0))

    def test_a_failed_first_save_leaves_nothing(self, door: Door, raw: RawFolder) -> None:
        with pytest.raises(DcpError, match="meant to fail"):
            door.save(state(1.0), planner=FailingPlanner())
        assert raw.names() == []
        with pytest.raises(CheckpointNotFoundError):
            door.load(blank(state(1.0)))

    def test_a_damaged_checkpoint_can_be_replaced(self, storage: Door, raw: RawFolder) -> None:
        storage.save(state(1.0))
        index = self.index_files(storage.checkpoint_id, raw)
        for name in index:
            raw.put(name, raw.get(name)[:-1])
        with pytest.raises(DcpError):
            storage.load(blank(state(1.0)))
        storage.save(state(2.0))
        self.assert_holds(storage, state(2.0))

    def test_a_second_live_save_is_refused(self, storage: Door, raw: RawFolder) -> None:
        storage.save(state(1.0))
        saving, go_on = threading.Event(), threading.Event()
        errors: list[BaseException] = []

        def pause() -> None:
            saving.set()
            go_on.wait(_WAIT_TIMEOUT_SECONDS)

        def first_save() -> None:
            try:
                storage.save(state(2.0), planner=FailingPlanner(action=pause))
            except BaseException as error:  # noqa: BLE001 - raised below, in the test's thread
                errors.append(error)

        first = threading.Thread(target=first_save)
        first.start()
        try:
            assert saving.wait(_WAIT_TIMEOUT_SECONDS)
            with pytest.raises(DcpError, match="save"):
                storage.save(state(3.0))
            self.assert_holds(storage, state(1.0))
        finally:
            go_on.set()
            first.join()
        if errors:
            raise errors[0]
        self.assert_holds(storage, state(2.0))
        index = self.index_files(storage.checkpoint_id, raw)
        storage.save(state(4.0))
        assert self.index_files(storage.checkpoint_id, raw) == index
        self.assert_holds(storage, state(4.0))

    def test_what_a_killed_save_leaves_is_removed_by_the_next(self, ranks: Any, storage: Door, raw: RawFolder) -> None:
        storage.save(state(1.0))
        index = self.index_files(storage.checkpoint_id, raw)
        ranks.run(1, _save_and_die, self.make_writer, storage.checkpoint_id, expect_death=[0])
        self.assert_holds(storage, state(1.0))
        storage.save(state(3.0))
        self.assert_holds(storage, state(3.0))
        assert self.index_files(storage.checkpoint_id, raw) == index

    def assert_holds(self, door: Door, wanted: dict[str, Any]) -> None:
        template = blank(wanted)
        door.load(template)
        assert same(template, wanted)


def _save_and_die(make_writer: Callable[[str], StorageWriter], checkpoint_id: str) -> None:
    planner = FailingPlanner(action=lambda: os.kill(os.getpid(), signal.SIGKILL))
    save(state(2.0), storage_writer=make_writer(checkpoint_id), planner=planner)
