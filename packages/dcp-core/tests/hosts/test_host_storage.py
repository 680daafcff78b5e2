"""Storages for the stores that each host has: which checkpoint ids they take."""

from __future__ import annotations

import pytest

from dcp_core.hosts.host_storage import HostStorageReader, HostStorageWriter


@pytest.mark.parametrize("storage", [HostStorageWriter, HostStorageReader])
@pytest.mark.parametrize(
    ("checkpoint_id", "fits"),
    [
        ("host:///nvme/run/step-1", True),
        ("host:///nvme/run/step-1?also=%2Fshared%2Frun%2Fstep-1", True),
        ("host://no/absolute/path", False),
        ("memory://run/step-1", False),
        ("no-such-scheme://somewhere/checkpoint", False),
        ("/nvme/run/step-1", False),
        ("", False),
    ],
)
def test_only_stores_of_each_host_are_valid(storage, checkpoint_id, fits):
    assert storage.validate_checkpoint_id(checkpoint_id) is fits
