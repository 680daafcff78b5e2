"""Who counts as a reader of a checkpoint."""

from __future__ import annotations

import json
import os
import time

import pytest

from dcp_io.checkpoints.remove_checkpoint import ReadingSign
from dcp_io.saves.save_files import ProcessIdentity, this_process

HERE = this_process()
DEAD = ProcessIdentity(HERE.host, HERE.boot_id, HERE.pid_namespace, 2**22 + 1, 1)
ELSEWHERE = ProcessIdentity("another-host", "x", "y", 1, 1)


@pytest.mark.parametrize(
    ("process", "age_seconds", "alive"),
    [
        (HERE, 0, True),
        (HERE, 10_000, True),
        (DEAD, 0, False),
        (ELSEWHERE, 0, True),
        (ELSEWHERE, 100, False),
        (None, 0, True),
        (None, 100, False),
    ],
    ids=["ours", "ours, old", "a dead one's", "another host's", "another host's, old", "unreadable", "unreadable, old"],
)
def test_who_is_alive(store, process, age_seconds, alive):
    store.publish(".dcp-reading-1", b"?" if process is None else json.dumps(process.to_dict()).encode(), sync=False)
    then = time.time() - age_seconds
    os.utime(os.path.join(store.path, ".dcp-reading-1"), (then, then))
    assert ReadingSign.alive(store, stale_after_seconds=60) == ([".dcp-reading-1"] if alive else [])


def test_a_sign_is_renewed_until_its_end(store):
    with ReadingSign(store, stale_after_seconds=1) as sign:
        path = os.path.join(store.path, sign.name)
        os.utime(path, (1000, 1000))
        deadline = time.monotonic() + 100
        while os.stat(path).st_mtime < 2000 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert os.stat(path).st_mtime > 2000
        assert ReadingSign.alive(store, stale_after_seconds=60) == [sign.name]
    assert store.list() == []
