from __future__ import annotations

import pytest

from dcp_manifest import CheckpointNotFoundError, CorruptCheckpointError, read_index
from dcp_manifest.file.manifest_write import encode
from dcp_manifest.folders.folder import is_index_name
from dcp_manifest.folders.index_choice import choose_index
from dcp_manifest.index.columns import ManifestInfo


@pytest.fixture
def folder(make_index, stock):
    """Index files as {name: (mtime, bytes)}, made by short descriptions."""

    class Folder(dict):
        def whole(self, save_id, generation, mtime=0.0, *, damaged=False, created_ns=0):
            data = encode(index(None, save_id, generation, 2, created_ns))
            self[".metadata"] = mtime, (data[:-100] if damaged else data)
            return self

        def rank(
            self, rank, save_id, generation, world_size=2, mtime=0.0, *, plain=True, named=True, of=None, created_ns=0
        ):
            data = encode(index(rank if of is None else of, save_id, generation, world_size, created_ns))
            if plain:
                self[f"__{rank}.metadata"] = mtime, data
            if named:
                self[f"__{rank}.{save_id}.metadata"] = mtime, data
            return self

        def stocks(self, name=".metadata", mtime=0.0):
            self[name] = mtime, stock.pickle(stock.metadata())
            return self

        def choose(self):
            self.read = []

            def read(name):
                self.read.append(name)
                return read_index(self[name][1], file=name)

            return choose_index({name: mtime for name, (mtime, _) in self.items()}, read)

    def index(rank, save_id, generation, world_size, created_ns):
        name = "w" if rank is None else f"w{rank}"
        return make_index(
            [(name, 0, 0, 0, (1,), [((0,), (1,))])],
            chunk_rows=[(0, 0, 0, 4, 0, 0, 0, 1)],
            dtypes=("float32",),
            files=(f"{save_id}.distcp",),
            info=ManifestInfo(save_id, world_size, "t", generation, rank, created_ns),
        )

    return Folder()


def test_the_whole_one(folder):
    assert folder.whole("a", 1).choose().info.save_id == "a"
    assert folder.read == [".metadata"]


@pytest.mark.parametrize("mtime", [0.0, 9.0])
def test_of_one_generation_the_one_whose_save_began_later_counts(folder, mtime):
    folder.whole("a", 2, 5.0, created_ns=7)
    for rank in (0, 1):
        folder.rank(rank, "b", 2, mtime=mtime, created_ns=8)
    assert folder.choose().info.save_id == "b"
    folder.whole("a", 2, 5.0, created_ns=9)
    assert folder.choose().info.save_id == "a"


def test_a_complete_set_is_merged(folder):
    index = folder.rank(0, "a", 1).rank(1, "a", 1).choose()
    assert index.tensor_names == ["w0", "w1"]
    assert (index.info.save_id, index.info.rank) == ("a", None)


@pytest.mark.parametrize("generation", [1, 3])
@pytest.mark.parametrize("mtime", [0.0, 9.0])
def test_the_higher_generation_wins_whatever_the_times(folder, generation, mtime):
    folder.whole("whole", 2, mtime=5.0)
    folder.rank(0, "ranks", generation, mtime=mtime).rank(1, "ranks", generation, mtime=mtime)
    assert folder.choose().info.save_id == ("ranks" if generation == 3 else "whole")


@pytest.mark.parametrize(("mtime", "chosen"), [(1.0, "ours"), (9.0, None)])
def test_where_stock_wrote_one_the_younger_file_wins(folder, mtime, chosen):
    folder.stocks(mtime=mtime).rank(0, "ours", 7, mtime=5.0).rank(1, "ours", 7, mtime=5.0)
    info = folder.choose().info
    assert (info.save_id if info else None) == chosen


def test_an_incomplete_set_does_not_count(folder):
    folder.whole("old", 1).rank(1, "new", 2, mtime=9.0)
    assert folder.choose().info.save_id == "old"


def test_a_set_needs_all_ranks_of_one_save(folder):
    folder.rank(0, "a", 1, named=False).rank(1, "b", 1, named=False)
    with pytest.raises(CheckpointNotFoundError, match="different saves"):
        folder.choose()


def test_missing_ranks_are_named(folder):
    folder.rank(0, "a", 1, world_size=4).rank(2, "a", 1, world_size=4)
    with pytest.raises(CheckpointNotFoundError, match=r"save a lacks the indexes of 2 of 4 ranks, such as \[1, 3\]"):
        folder.choose()


def test_an_old_set_survives_a_new_one_that_is_not_complete(folder):
    """A save without a coordinator was killed when half of its ranks had published."""
    folder.rank(0, "old", 1).rank(1, "old", 1)
    folder.rank(0, "new", 2, mtime=9.0)
    assert folder.choose().info.save_id == "old"
    folder.rank(1, "new", 2, mtime=9.0)
    assert folder.choose().info.save_id == "new"


def test_a_smaller_world_leaves_no_traces(folder):
    for rank in range(4):
        folder.rank(rank, "old", 1, world_size=4)
    folder.rank(0, "new", 2).rank(1, "new", 2)
    index = folder.choose()
    assert (index.info.save_id, index.tensor_names) == ("new", ["w0", "w1"])


def test_a_set_without_ids_in_its_names(folder):
    folder.rank(0, "a", 1, named=False).rank(1, "a", 1, named=False)
    assert folder.choose().tensor_names == ["w0", "w1"]


def test_stocks_sets_are_merged(folder):
    folder.stocks("__0.metadata").stocks("__1.metadata")
    assert folder.choose().tensor_names == ["w"]
    del folder["__0.metadata"]
    with pytest.raises(CheckpointNotFoundError, match="lacks the indexes of 1 of 2 ranks"):
        folder.choose()


def test_stock_saved_over_our_set(folder):
    folder.rank(0, "a", 1, mtime=1.0).rank(1, "a", 1, mtime=1.0)
    folder.stocks("__0.metadata", mtime=5.0).stocks("__1.metadata", mtime=5.0)
    assert folder.choose().info is None


def test_a_damaged_newest_index_is_not_passed_over(folder):
    folder.whole("new", 2, mtime=9.0, damaged=True).rank(0, "old", 1, mtime=1.0).rank(1, "old", 1, mtime=1.0)
    with pytest.raises(CorruptCheckpointError):
        folder.choose()


def test_a_damaged_rank_index_is_refused(folder):
    folder.rank(0, "a", 1).rank(1, "a", 1)
    mtime, data = folder["__1.a.metadata"]
    folder["__1.a.metadata"] = mtime, data[:-1]
    with pytest.raises(CorruptCheckpointError, match=r"__1\.a\.metadata"):
        folder.choose()


def test_swapped_files_are_refused(folder):
    folder.rank(0, "a", 1).rank(1, "a", 1, of=0)
    with pytest.raises(CorruptCheckpointError, match="renamed or swapped"):
        folder.choose()


def test_no_index_at_all(folder):
    folder["x.distcp"] = 0.0, b""
    with pytest.raises(CheckpointNotFoundError):
        folder.choose()


@pytest.mark.parametrize("name", [".metadata", "__0.metadata", "__12.0a_b-c.metadata"])
def test_names_of_indexes(name):
    assert is_index_name(name)


@pytest.mark.parametrize(
    "name", ["metadata", ".metadata.tmp", "__.metadata", "__0_0.distcp", "__0.a.b.metadata", "__²"]
)
def test_names_of_other_files(name):
    assert not is_index_name(name)
