"""`StorageConformance`: the conformance suite of storages, with its tests in one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

import pytest
import torch

from dcp_core.errors import CheckpointNotFoundError
from dcp_core.loading import load_keys
from dcp_core.saving import save
from dcp_core.testing.conformance.damage import DamageTests
from dcp_core.testing.conformance.folder import Door, RawFolder, StorageFixtures
from dcp_core.testing.conformance.on_ranks import RankTests
from dcp_core.testing.conformance.resaving import ResavingTests
from dcp_core.testing.conformance.states import VALUES, blank, state
from dcp_core.testing.trees import same

__all__ = ["StorageConformance"]

_SAVES = 12
_SLACK_BYTES = 256 << 10
_WAIT_TIMEOUT_SECONDS = 60.0


class _RoundTripTests(StorageFixtures):
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


class _ReadingTests(StorageFixtures):
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

        with _Background(read, look) as readers:
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


class _Background:
    """Repeats each action in a thread; an error stops all, and is raised at the end."""

    def __init__(self, *actions: Callable[[], None]) -> None:
        self._done = threading.Event()
        self._errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._repeat, args=(action,)) for action in actions]

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _WAIT_TIMEOUT_SECONDS
        while not condition() and not self._done.is_set() and time.monotonic() < deadline:
            time.sleep(0.001)

    def __enter__(self) -> _Background:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join()
        if self._errors and error is None:
            raise self._errors[0]

    def _repeat(self, action: Callable[[], None]) -> None:
        try:
            while not self._done.is_set():
                action()
        except BaseException as error:  # noqa: BLE001 - raised at the end of the block, in the test's thread
            self._errors.append(error)
            self._done.set()


class StorageConformance(_RoundTripTests, _ReadingTests, ResavingTests, DamageTests, RankTests):
    """Conformance suite of a storage, to derive from.

    ```python
    class TestMyStorage(StorageConformance):
        @pytest.fixture
        def checkpoint_id(self, tmp_path):
            return f"mine://{tmp_path}/checkpoint"

        @pytest.fixture
        def raw(self, tmp_path):
            return LocalFolder(tmp_path / "checkpoint")

        def make_writer(self, checkpoint_id):
            return MyWriter(checkpoint_id)

        def make_reader(self, checkpoint_id):
            return MyReader(checkpoint_id)
    ```

    A fixture `ranks` provides real ranks, for example in `conftest.py`:

    ```python
    @pytest.fixture(scope="session")
    def ranks():
        with dcp_ranks.testing.ranks.RankPool(2) as pool:
            yield pool
    ```

    Define the class at the top level of its module: ranks unpickle it.
    """
