from __future__ import annotations

import os
import threading

import pytest

from dcp_base.errors import DcpError
from dcp_io import (
    CheckpointExistsError,
    CheckpointReplacedError,
    LocalStore,
    SaveInProgressError,
    StoreBackend,
)
from dcp_io.requests import ReadRequest
from dcp_manifest.errors import CheckpointNotFoundError, CorruptCheckpointError

OLD, NEW = [{"a": b"1" * 100}, {"b": b"2"}], [{"a": b"3" * 100}, {"c": b"4"}]


@pytest.mark.parametrize("layout", ["torch", "raw"])
@pytest.mark.parametrize("single_file", [True, False])
@pytest.mark.parametrize("verify", ["blocks", "before", False])
def test_save_and_load(store, helpers, layout, single_file, verify):
    for values in (OLD, NEW):
        helpers.save_all(store, values, layout=layout, single_file=single_file, threads=2)
        assert helpers.load_all(store, verify=verify) == helpers.merged(values)


def test_nothing_there(tmp_path):
    backend = StoreBackend(LocalStore(tmp_path / "nowhere"))
    assert backend.read_current() is None
    assert backend.url == str(tmp_path / "nowhere")
    with pytest.raises(CheckpointNotFoundError, match=r"no checkpoint in .*nowhere: .*check the path"):
        backend.read_index()
    assert not (tmp_path / "nowhere").exists()


def test_a_damaged_index_is_told_from_none(store, helpers):
    helpers.save_all(store, OLD)
    store.publish(".metadata", b"damaged")
    backend = StoreBackend(store)
    assert backend.read_current() is None
    with pytest.raises(CorruptCheckpointError):
        backend.read_index()
    with pytest.raises(CheckpointExistsError):
        backend.begin_save(overwrite=False)
    helpers.save_all(store, NEW)
    assert helpers.load_all(store) == helpers.merged(NEW)


def test_calls_out_of_order_are_refused(store):
    backend = StoreBackend(store)
    for call in (
        lambda: backend.publish(".metadata", b""),
        lambda: backend.finish_save(()),
        lambda: backend.write([], prefix="__0_", save_id="x"),
    ):
        with pytest.raises(DcpError, match="no save is running"):
            call()
    backend.abort_save()
    backend.join_save("abc")
    with pytest.raises(DcpError, match="only the coordinator of save abc"):
        backend.publish(".metadata", b"")
    with pytest.raises(DcpError, match="save x was not begun"):
        backend.write([], prefix="__0_", save_id="x")


def test_joining_may_be_repeated_and_makes_the_folder(tmp_path, helpers):
    store = LocalStore(tmp_path / "new")
    backend = StoreBackend(store)
    for _ in range(2):
        backend.join_save("abc")
    backend.write([helpers.raw_request("x", b"1")], prefix="__1_", save_id="abc")
    backend.join_save("abc")
    backend.abort_save()
    assert store.list() == []


def start(store, helpers, ranks=2):
    backends = [StoreBackend(store) for _ in range(ranks)]
    save_id = backends[0].begin_save(overwrite=True)
    for rank, backend in enumerate(backends):
        if rank:
            backend.join_save(save_id)
        backend.write([helpers.raw_request("x", b"1")], prefix=f"__{rank}_", save_id=save_id)
    return backends


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_save_that_all_ranks_abort_leaves_the_old_checkpoint(store, helpers, order):
    helpers.save_all(store, OLD)
    before = helpers.names(store)
    backends = start(store, helpers)
    for rank in order:
        backends[rank].abort_save()
        backends[rank].abort_save()
    assert helpers.names(store) == before
    assert helpers.load_all(store) == helpers.merged(OLD)


def test_a_rank_that_gives_up_alone_cannot_hurt_what_the_coordinator_publishes(store, helpers):
    from dcp_manifest.file.manifest_write import encode
    from dcp_manifest.index.columns import ManifestInfo

    backends = start(store, helpers)
    names = [name for name in helpers.names(store) if name.endswith(".distcp")]
    backends[1].abort_save()
    assert set(names) < set(helpers.names(store))
    save_id = names[0].split(".")[1]
    backends[0].publish(".metadata", encode(helpers.make_index({}, info=ManifestInfo(save_id, 2, "test"))))
    backends[0].finish_save(names)
    late = StoreBackend(store)
    late.join_save(save_id)
    late.write([helpers.raw_request("x", b"1")], prefix="__2_", save_id=save_id)
    late.abort_save()
    assert set(names) < set(helpers.names(store))


def test_a_rank_that_writes_after_the_coordinator_gave_up_removes_its_own(store, helpers, monkeypatch):
    helpers.save_all(store, OLD)
    before = helpers.names(store)
    backends = start(store, helpers)
    save_id = backends[0]._running().save_id
    backends[0].abort_save()
    backends[1].write([helpers.raw_request("y", b"1")], prefix="__1_9", save_id=save_id)
    when_synced = []
    monkeypatch.setattr(LocalStore, "sync_folder", lambda self: when_synced.append(helpers.names(self)))
    backends[1].abort_save()
    assert helpers.names(store) == before
    assert when_synced[-1] == before, "a loss of power would bring the files back"


def test_a_rank_removes_nothing_while_the_index_cannot_be_read(store, helpers):
    """The index may be that of this save."""
    backend = StoreBackend(store)
    backend.join_save("abc")
    backend.write([helpers.raw_request("y", b"1")], prefix="__1_", save_id="abc")
    store.publish(".metadata", b"damaged")
    backend.abort_save()
    assert store.exists("__1_0.abc.distcp")


def test_a_failed_write_leaves_the_old_checkpoint(store, helpers, patch_os):
    helpers.save_all(store, OLD)
    before = helpers.names(store)
    backend = StoreBackend(store)
    save_id = backend.begin_save(overwrite=True)

    def full(*args):
        raise OSError(28, "No space left on device")

    patch_os(pwritev=full)
    with pytest.raises(OSError, match="No space"):
        backend.write([helpers.raw_request("x", b"1")], prefix="__0_", save_id=save_id)
    backend.abort_save()
    patch_os()
    assert helpers.names(store) == before
    assert helpers.load_all(store) == helpers.merged(OLD)


def test_a_second_save_beside_is_refused_while_the_first_runs(store, helpers):
    backends = start(store, helpers)
    with pytest.raises(SaveInProgressError):
        StoreBackend(store).begin_save(overwrite=True)
    backends[0].abort_save()
    helpers.save_all(store, NEW)


def test_a_reader_whose_checkpoint_was_replaced_is_told_so(store, helpers):
    helpers.save_all(store, OLD)
    backend = StoreBackend(store)
    index = backend.read_index()
    item = index.stored_item(index.chunk_items, 0)
    save_id = helpers.save_all(store, NEW)
    with pytest.raises(CheckpointReplacedError, match="load again") as caught:
        backend.read([ReadRequest("a", item, 0, item.stored_bytes)])
    assert caught.value.save_id == save_id
    backend.read_index()
    store.delete(f"__0_0.{save_id}.distcp")
    with pytest.raises(CheckpointNotFoundError) as missing:
        helpers.load_all(store)
    assert not isinstance(missing.value, CheckpointReplacedError)


def test_changed_keys_are_those_of_the_last_read(store, helpers):
    helpers.save_all(store, OLD)
    backend = StoreBackend(store)
    index = backend.read_index()
    item = index.stored_item(index.chunk_items, 0)
    with open(os.path.join(store.path, item.file), "r+b") as file:
        file.seek(item.offset + item.lead)
        file.write(b"X")
    with pytest.raises(CorruptCheckpointError):
        backend.read([ReadRequest("a", item, 0, item.stored_bytes)])
    assert backend.changed_keys == set()
    other = index.stored_item(index.chunk_items, 1)
    backend.read([ReadRequest("b", other, 0, other.stored_bytes)])
    assert backend.changed_keys == {"b"}


def test_readers_see_old_or_new_while_saves_replace_each_other(store, helpers):
    """Reads the index and then the data, and starts over if the checkpoint was replaced meanwhile."""
    versions = [{"a": bytes([n]) * 5000, "b": bytes([n]) * 9} for n in range(30)]
    helpers.save_all(store, [versions[0]], sync=False)
    done = threading.Event()
    problems = []
    seen = set()

    def read():
        while not (done.is_set() and seen):  # the last load, after all saves, always succeeds
            try:
                found = helpers.load_all(store)
            except CheckpointReplacedError:
                continue
            except Exception as error:
                problems.append(error)
                return
            if found not in versions:
                problems.append(found)
            seen.add(found["a"][0])

    reader = threading.Thread(target=read)
    reader.start()
    for version in versions:
        helpers.save_all(store, [version], sync=False)
    done.set()
    reader.join()
    assert problems == []
    assert seen
    assert helpers.load_all(store) == versions[-1]


def test_everything_is_durable_before_the_index_is_published(store, helpers, patch_os):
    """No file that the index names has unsynced bytes or an unsynced name when the index replaces the old one."""
    helpers.save_all(store, OLD)
    dirty, unsynced_names, paths, checked = set(), set(), {}, []

    def opened(path, flags, mode=0o777):
        fd = os.open(path, flags, mode)
        paths[fd] = path
        if flags & os.O_CREAT:
            unsynced_names.add(path)
        return fd

    def pwritev(fd, buffers, offset):
        dirty.add(paths[fd])
        return os.pwritev(fd, buffers, offset)

    def fsync(fd):
        dirty.discard(paths[fd])
        if os.path.isdir(paths[fd]):
            unsynced_names.clear()
        os.fsync(fd)

    def replace(source, target):
        if target.endswith("/.metadata"):
            checked.append(target)
            assert not [name for name in dirty if name.endswith(".distcp") or name == source]
            assert not [name for name in unsynced_names if name.endswith(".distcp")]
        os.replace(source, target)
        unsynced_names.discard(source)
        unsynced_names.add(target)

    patch_os(open=opened, pwritev=pwritev, fsync=fsync, replace=replace)
    helpers.save_all(store, NEW, threads=2, single_file=False)
    assert len(checked) == 1
    assert os.path.join(store.path, ".metadata") not in unsynced_names
