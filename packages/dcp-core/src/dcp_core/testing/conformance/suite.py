"""`StorageConformance`: the conformance suite of storages."""

from __future__ import annotations

from dcp_core.testing.conformance.damage import DamageTests
from dcp_core.testing.conformance.on_ranks import RankTests
from dcp_core.testing.conformance.reading import ReadingTests
from dcp_core.testing.conformance.resaving import ResavingTests
from dcp_core.testing.conformance.round_trips import RoundTripTests

__all__ = ["StorageConformance"]


class StorageConformance(RoundTripTests, ReadingTests, ResavingTests, DamageTests, RankTests):
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
