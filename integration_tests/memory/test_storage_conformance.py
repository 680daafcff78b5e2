"""Checkpoints at `keeper://` pass the suite that third parties run against their storages, on one rank and on two."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from dcp_core.hosts.host_storage import HostStorageReader, HostStorageWriter
from dcp_core.testing.conformance import Door, StorageConformance
from dcp_io import open_store
from dcp_memory import stop_keeper
from dcp_memory.client.connection import forget_connections
from dcp_memory.places import FOLDER_VARIABLE
from dcp_ranks.testing.ranks import RankPool
from integration_tests.kits.raw_store import RawStore

RUN = "conformance"
_numbers = itertools.count()


class RawObjects(RawStore):
    """The objects of a folder in a keeper, in which there are no folders."""

    def names(self) -> list[str]:
        assert self._store.folders() == ()
        return super().names()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Ranks that find the keeper of this module; nothing of it is left at the end."""
    place = tmp_path_factory.mktemp("conformance") / "keepers"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(place))
        patch.setenv("DCP_KEEPER_MAX_BYTES", str(1 << 30))
        with RankPool(2, timeout_seconds=240) as pool:
            yield pool
        assert stop_keeper(RUN)
        assert [*place.iterdir()] == []
        forget_connections(str(place))


@pytest.mark.usefixtures("ranks")
class TestKeeper(StorageConformance):
    needs_collectives = "each host has a store of its own"
    needs_all_files = "the ranks choose a save of which their hosts have all files together"

    @pytest.fixture
    def checkpoint_id(self) -> str:
        return f"keeper://{RUN}/{next(_numbers)}/checkpoint"

    @pytest.fixture
    def raw(self, checkpoint_id: str) -> Any:
        return RawObjects(open_store(checkpoint_id))

    def make_writer(self, checkpoint_id: str) -> HostStorageWriter:
        return HostStorageWriter(checkpoint_id)

    def make_reader(self, checkpoint_id: str) -> HostStorageReader:
        return HostStorageReader(checkpoint_id)

    @pytest.mark.slow  # ranks that have died are started again
    def test_the_death_of_a_job_keeps_the_old_checkpoint(self, ranks: Any, storage: Door, raw: Any) -> None:
        super().test_the_death_of_a_job_keeps_the_old_checkpoint(ranks, storage, raw)
