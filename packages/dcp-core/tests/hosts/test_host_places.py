"""Folders of hosts that take no file, or are not there: what may begin all the same, and what is said."""

from __future__ import annotations

import errno
import os

import pytest

from dcp_core import CheckpointNotFoundError, CorruptCheckpointError, load, save
from dcp_core.hosts.host_places import find_places
from dcp_io import LocalStore
from dcp_ranks.phases.coordinator import LocalCoordinator


@pytest.fixture
def saved(tmp_path):
    """A folder of this host with one checkpoint."""
    save({"step": 10}, checkpoint_id=f"host://{tmp_path}/run/step-10")
    return tmp_path / "run"


@pytest.fixture(params=[errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EACCES])
def takes_nothing(request, monkeypatch):
    """No folder takes a file."""

    def refuse(store, name, *_, **__):
        raise OSError(request.param, os.strerror(request.param), name)

    monkeypatch.setattr(LocalStore, "publish", refuse)


def test_a_load_needs_no_room(saved, takes_nothing):
    state = {"step": 0}
    load(state, checkpoint_id=f"host://{saved}/step-10")
    assert state == {"step": 10}


def test_a_restart_needs_no_room(saved, takes_nothing):
    places = find_places(LocalCoordinator(), LocalStore(saved), saves=False)
    assert places.leads
    assert places.count == 1
    assert not places.are_proved


def test_a_save_into_a_full_folder_fails(saved, fill_disk):
    fill_disk()
    with pytest.raises(OSError, match="No space left"):
        save({"step": 20}, checkpoint_id=f"host://{saved}/step-20")


def test_a_full_disk_takes_what_proves_that_ranks_share_it(saved, fill_disk):
    fill_disk()
    places = find_places(LocalCoordinator(), LocalStore(saved))
    assert places.leads
    assert places.are_proved


def test_a_mistyped_folder_is_said(saved):
    with pytest.raises(CheckpointNotFoundError, match="rum is missing or empty for every rank of this job; check the"):
        load({"step": 0}, checkpoint_id=f"host://{saved.parent}/rum/step-10")
    with pytest.raises(CheckpointNotFoundError, match="no complete checkpoint on the host of this job: no host has an"):
        load({"step": 0}, checkpoint_id=f"host://{saved}/step-11")
    assert not (saved.parent / "rum").exists()


def test_a_damaged_index_in_the_shared_folder_is_said(saved):
    """Nothing is on this host, and what all hosts share cannot be read."""
    index = saved / "step-10" / ".metadata"
    index.write_bytes(index.read_bytes()[:99])
    with pytest.raises(CorruptCheckpointError):
        load({"step": 0}, checkpoint_id=f"host://{saved.parent}/rum/step-10?also={saved}/step-10")
