"""A process that saves is killed before each call that changes or syncs a file or folder, one after another.

Whatever is left must load as exactly the old or exactly the new checkpoint, and the next save must clean it up.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback

import pytest

from dcp_io import LocalStore
from dcp_io.markers import find_markers

OLD = [{"a": b"1" * 100, "b": b"2" * 70_000}, {"c": b"3" * 10}]
NEW = [{"a": b"x" * 90, "d": b"y" * 80_000}, {"c": b"z" * 20, "e": b"w"}]
CALLS = ("open", "pwritev", "fsync", "replace", "unlink", "mkdir", "utime")
FINISHED, BROKEN = 77, 78
# Temporary files of markers carry no process; they are removed when they are old.
AT_ONCE = {"stale_after_seconds": 1e-9, "sync": False}


def merged(values):
    return {key: data for mine in values for key, data in mine.items()}


def run_and_kill(patch_os, action, number, *, torn):
    """Run `action` in a child that is killed before its call `number`; whether it finished without reaching it.

    With `torn` only writes are counted, and half of the bytes of the last one arrive.
    """
    pid = os.fork()
    if pid == 0:
        count = 0

        def counted(name):
            def call(*args, **kwargs):
                nonlocal count
                changes = name != "open" or args[1] & os.O_CREAT
                count += bool(name == "pwritev" if torn else changes)
                if count == number:
                    if torn:
                        fd, buffers, offset = args
                        data = b"".join(buffers)
                        os.pwrite(fd, data[: len(data) // 2], offset)
                    os.kill(os.getpid(), signal.SIGKILL)
                return getattr(os, name)(*args, **kwargs)

            return call

        try:
            patch_os(**{name: counted(name) for name in CALLS})
            action()
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
            os._exit(BROKEN)
        os._exit(FINISHED)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert os.WEXITSTATUS(status) == FINISHED
    return True


def check_everywhere(tmp_path, patch_os, prepare, action, after):
    """Kill `action` at every call; `after` sees the store each time. Returns how often the new one was found."""
    new = kills = 0
    for torn in (False, True):
        for number in range(1, 500):
            store = LocalStore(tmp_path / f"{torn}{number}")
            store.make()
            prepare(store)
            finished = run_and_kill(patch_os, lambda store=store: action(store), number, torn=torn)
            new += after(store)
            if finished:
                break
            kills += 1
    assert kills > 20
    return new, kills


@pytest.mark.parametrize("single_file", [True, False])
def test_re_save_of_two_ranks(tmp_path, patch_os, helpers, single_file):
    """Neither the checkpoint in the folder nor one beside it is harmed at any point."""
    options = {"single_file": single_file}
    beside = LocalStore(tmp_path / "beside")
    helpers.save_all(beside, OLD)

    def after(store):
        assert helpers.load_all(beside) == merged(OLD)
        found = helpers.load_all(store)
        assert found in (merged(OLD), merged(NEW))
        helpers.save_all(store, [{"last": b"1"}], **AT_ONCE)
        assert helpers.load_all(store) == {"last": b"1"}
        assert len(store.list()) == 2, helpers.names(store)
        return found == merged(NEW)

    new, kills = check_everywhere(
        tmp_path,
        patch_os,
        lambda store: helpers.save_all(store, OLD, sync=False, **options),
        lambda store: helpers.save_all(store, NEW, **options),
        after,
    )
    assert 2 < new < kills


def test_first_save(tmp_path, patch_os, helpers):
    def after(store):
        exists = store.exists(".metadata")
        assert not exists or helpers.load_all(store) == merged(NEW)
        helpers.save_all(store, [{"last": b"1"}], **AT_ONCE)
        assert len(store.list()) == 2, helpers.names(store)
        return exists

    new, kills = check_everywhere(
        tmp_path, patch_os, lambda store: None, lambda store: helpers.save_all(store, NEW), after
    )
    assert 2 < new < kills


def test_save_without_a_coordinator(tmp_path, patch_os, helpers):
    def after(store):
        found = helpers.load_all(store)
        assert found in (merged(OLD), merged(NEW))
        helpers.save_all(store, [{"last": b"1"}], **AT_ONCE)
        assert helpers.load_all(store) == {"last": b"1"}
        assert [name for name in helpers.names(store) if name.endswith(".distcp") or "dcp-save" in name] == [
            entry.name for entry in store.list() if entry.name.startswith("__0_0.")
        ]
        return found == merged(NEW)

    new, kills = check_everywhere(
        tmp_path,
        patch_os,
        lambda store: helpers.save_all(store, OLD, rank_local_id="old", sync=False),
        lambda store: helpers.save_all(store, NEW, rank_local_id="new"),
        after,
    )
    assert 2 < new < kills


@pytest.mark.parametrize(("first", "second"), [(None, "new"), ("old", None)])
def test_changing_between_the_two_kinds_of_save(tmp_path, patch_os, helpers, first, second):
    def after(store):
        found = helpers.load_all(store)
        assert found in (merged(OLD), merged(NEW))
        return found == merged(NEW)

    new, kills = check_everywhere(
        tmp_path,
        patch_os,
        lambda store: helpers.save_all(store, OLD, rank_local_id=first, sync=False),
        lambda store: helpers.save_all(store, NEW, rank_local_id=second),
        after,
    )
    assert 2 < new < kills


def test_cleanup_of_a_dead_save_may_be_killed_too(tmp_path, patch_os, helpers):
    """A save dies while writing; the next one dies while it cleans up and saves; the third finds order."""

    def prepare(store):
        helpers.save_all(store, OLD, sync=False)
        run_and_kill(patch_os, lambda: helpers.save_all(store, NEW), 16, torn=False)
        assert find_markers(store, store.list())

    def after(store):
        found = helpers.load_all(store)
        assert found in (merged(OLD), merged(NEW))
        helpers.save_all(store, [{"last": b"1"}], **AT_ONCE)
        assert len(store.list()) == 2, helpers.names(store)
        return found == merged(NEW)

    new, kills = check_everywhere(tmp_path, patch_os, prepare, lambda store: helpers.save_all(store, NEW), after)
    assert 0 < new < kills
