"""One TCP stream between two pretended hosts, memory to memory: the floor of what crosses a network."""

from __future__ import annotations

import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import numpy as np

from integration_tests.kits.networks import NetworkHost

__all__ = ["raw_seconds"]

_MODULE = "integration_tests.benchmarks.memory.raw_stream"
_STEP_BYTES = 4 << 20


def raw_seconds(hosts: Sequence[NetworkHost], nbytes: int, rounds: int, *, untouched: bool = False) -> float:
    """Return the median time in which so many bytes go from the first host to the second.

    Args:
        hosts: The hosts.
        nbytes: Number of bytes.
        rounds: Number of rounds.
        untouched: Whether they go into memory as untouched as that of a new process, in each round.
    """
    receiver = _start(hosts[1], "receive", str(nbytes), str(rounds), str(int(untouched)))
    assert receiver.stdout is not None
    port = receiver.stdout.readline().strip()
    sender = _start(hosts[0], "send", str(nbytes), str(rounds), hosts[1].addresses[0], port)
    try:
        printed, _ = receiver.communicate(timeout=600)
    finally:
        for process in (sender, receiver):
            process.kill()
            process.wait()
    return statistics.median(map(float, printed.split()))


def _start(host: NetworkHost, *arguments: str) -> subprocess.Popen[str]:
    place = ["nsenter", "--target", str(host.pid), "--net"]
    return subprocess.Popen([*place, sys.executable, "-m", _MODULE, *arguments], stdout=subprocess.PIPE, text=True)


def _receive(nbytes: int, rounds: int, untouched: int) -> None:
    memory = np.ones(nbytes, np.uint8).data
    with socket.create_server(("0.0.0.0", 0)) as server:
        print(server.getsockname()[1], flush=True)
        connection, _ = server.accept()
    for _ in range(rounds):
        if untouched:
            memory = np.empty(nbytes, np.uint8).data
        connection.sendall(b"!")
        begin, at = time.monotonic(), 0
        while at < nbytes:
            at += connection.recv_into(memory[at : at + _STEP_BYTES])
        print(time.monotonic() - begin, flush=True)


def _send(nbytes: int, rounds: int, address: str, port: int) -> None:
    memory = np.ones(nbytes, np.uint8).data
    with socket.create_connection((address, port)) as connection:
        for _ in range(rounds):
            connection.recv(1)
            for at in range(0, nbytes, _STEP_BYTES):
                connection.sendall(memory[at : at + _STEP_BYTES])
        connection.recv(1)  # until the receiver ends


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        _receive(*map(int, sys.argv[2:5]))
    else:
        _send(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
