"""Processes are told apart, and their end is seen."""

from __future__ import annotations

import select
import subprocess
import sys
from dataclasses import replace

import pytest

from dcp_ranks.peers.roster import own_identity, watch_process


def child():
    """A process that ends with its stdin; how it sees itself."""
    code = (
        "import sys; from dcp_ranks.peers.roster import own_identity as o; i = o();"
        "print(i.host, i.pid, i.started, sep='|', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    host, pid, started = process.stdout.readline().split("|")
    return process, replace(own_identity(), host=host, pid=int(pid), started=int(started))


def test_the_end_of_a_process_is_seen_and_no_other_is_taken_for_it():
    process, identity = child()
    own = own_identity()
    assert identity.host == own.host
    assert identity != own
    descriptor = watch_process(identity, own.host)
    with select.epoll() as poller:
        poller.register(descriptor, select.EPOLLIN)
        assert poller.poll(0) == []
        # A later process with the same number, as far as the kernel can tell.
        with pytest.raises(ProcessLookupError):
            watch_process(replace(identity, started=identity.started - 1), own.host)
        process.communicate()
        assert [ready for ready, _ in poller.poll(10)] == [descriptor]
        poller.unregister(descriptor)
    with open(descriptor, "rb"):
        pass
    with pytest.raises(ProcessLookupError):
        watch_process(identity, own.host)


def test_a_process_of_another_host_or_container_is_not_watched():
    own = own_identity()
    assert watch_process(replace(own, host="another boot, or pid namespace"), own.host) is None
