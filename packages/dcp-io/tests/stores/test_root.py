"""A root of several places: the copy in the nearest place comes first, and a place that is away is passed over."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from dcp_io import LocalStore, Store, find_checkpoints, latest_valid
from dcp_io.stores.root import places_of


class Away(LocalStore):
    """A place whose storage does not answer."""

    def list(self):
        raise OSError("the storage does not answer")

    def folders(self):
        raise OSError("the storage does not answer")


class Hangs(LocalStore):
    """A place whose storage answers nothing before an event."""

    def __init__(self, path, ends: threading.Event) -> None:
        super().__init__(path)
        self._ends = ends

    def folders(self):
        self._ends.wait()
        return super().folders()


class Several:
    def __init__(self, *places: Store) -> None:
        self.places = places


@pytest.fixture
def near(tmp_path):
    return LocalStore(tmp_path / "near")


@pytest.fixture
def far(tmp_path):
    return LocalStore(tmp_path / "far")


def save(place: Store, step: int, helpers, key: str = "a") -> None:
    store = place.child(f"step-{step}")
    store.make()
    helpers.save_all(store, [{key: b"1234"}], sync=False)


def copy(step: int, source: LocalStore, target: LocalStore) -> None:
    shutil.copytree(Path(source.path, f"step-{step}"), Path(target.path, f"step-{step}"))


def found(root) -> list[tuple[str, int | None]]:
    return [(Path(one.store.url).parent.name, one.step) for one in find_checkpoints(root)]


def test_a_path_and_a_store_are_one_place(tmp_path, near):
    assert places_of(near) == (near,)
    (place,) = places_of(tmp_path)
    assert place.url == str(tmp_path)


def test_newest_first_and_the_nearest_copy_first(near, far, helpers):
    for step in (10, 20):
        save(near, step, helpers)
    copy(20, near, far)
    save(far, 5, helpers)
    root = Several(near, far)
    assert found(root) == [("near", 20), ("far", 20), ("near", 10), ("far", 5)]
    assert found(Several(far, near))[:2] == [("far", 20), ("near", 20)]


def test_a_damaged_near_copy_gives_way_to_the_far_one(near, far, helpers):
    save(near, 20, helpers)
    copy(20, near, far)
    for path in Path(near.path, "step-20").glob("*.distcp"):
        path.unlink()
    assert latest_valid(Several(near, far)).store.url == far.child("step-20").url


def test_of_two_saves_of_one_step_the_later_comes_first(near, far, helpers):
    save(near, 20, helpers)
    save(far, 20, helpers, key="later")
    assert found(Several(near, far)) == [("far", 20), ("near", 20)]


def test_a_place_that_is_away_is_passed_over_with_a_warning(near, tmp_path, helpers, caplog):
    save(near, 20, helpers)
    assert found(Several(Away(tmp_path / "away"), near)) == [("near", 20)]
    assert "does not answer" in caplog.text


def test_nothing_and_a_place_that_is_away_is_an_error(near, tmp_path):
    with pytest.raises(OSError, match="does not answer"):
        find_checkpoints(Several(near, Away(tmp_path / "away")))


@pytest.fixture
def ends(monkeypatch):
    monkeypatch.setattr("dcp_io.timed_call.TimedCall.SILENT_AFTER_SECONDS", 0.1)
    event = threading.Event()
    yield event
    event.set()


def test_a_place_that_hangs_is_passed_over_with_a_warning(near, far, helpers, caplog, ends):
    save(near, 20, helpers)
    save(far, 30, helpers)
    hanging = Hangs(far.path, ends)
    assert found(Several(near, hanging)) == [("near", 20)]
    assert "far does not answer" in caplog.text
    assert latest_valid(Several(near, hanging)).step == 20
    ends.set()
    while latest_valid(Several(near, hanging)).step != 30:
        pass


@pytest.mark.parametrize("other", [LocalStore, Away])
def test_the_only_place_with_checkpoints_is_waited_for(other, tmp_path, far, helpers, ends):
    save(far, 30, helpers)
    threading.Timer(0.4, ends.set).start()
    assert found(Several(other(tmp_path / "near"), Hangs(far.path, ends))) == [("far", 30)]
