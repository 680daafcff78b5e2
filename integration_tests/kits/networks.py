"""Network namespaces as pretended hosts for tests, with interfaces and networks between them.

Needs root, the commands `ip`, `tc`, `unshare` and `nsenter`, and a kernel with veth.

Source: Linux `network_namespaces(7)`, `setns(2)`, `veth(4)`, `tc-blackhole`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Network", "NetworkHost", "network_hosts", "networks_missing"]

_CLONE_NEWNET = 0x40000000
_START_TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class NetworkHost:
    """A pretended host: the network namespace of process `pid`, with an IPv4 address per network."""

    pid: int
    addresses: tuple[str, ...]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Sockets that the main thread opens inside belong to the pretended host. Threads started inside keep it."""
        own = os.open(f"/proc/self/task/{threading.get_native_id()}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        other = os.open(f"/proc/{self.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _enter(other)
            try:
                yield
            finally:
                _enter(own)
        finally:
            os.close(own)
            os.close(other)

    def run(self, *arguments: str) -> None:
        """Run a command on the pretended host. Raises RuntimeError with its output."""
        _run("nsenter", "--target", str(self.pid), "--net", *arguments)

    def block(self, network: int = 0) -> None:
        """Silently drop all packets that this host sends into a network."""
        self.run("tc", "qdisc", "replace", "dev", f"net{network}", "root", "blackhole")

    def unblock(self, network: int = 0) -> None:
        self.run("tc", "qdisc", "del", "dev", f"net{network}", "root")

    def limit(self, rate: str, network: int = 0) -> None:
        """Limit what this host sends into a network, such as to `800mbit` (100 MB/s)."""
        shape = ("tbf", "rate", rate, "burst", "256k", "latency", "200ms")
        self.run("tc", "qdisc", "replace", "dev", f"net{network}", "root", *shape)


@dataclass(frozen=True, slots=True)
class Network:
    """IP network between pretended hosts, such as `10.77.0.0/24`."""

    number: int
    text: str


@contextlib.contextmanager
def network_hosts(hosts: int, networks: int = 1) -> Iterator[tuple[list[NetworkHost], list[Network]]]:
    """Pretended hosts that share one or more networks; all end with the block.

    Host i has the address 10.77.<network>.<i + 1>, on the interface `net<network>`.
    """
    with contextlib.ExitStack() as stack:
        pids = [stack.enter_context(_namespace()) for _ in range(hosts + 1)]
        switch = NetworkHost(pids[hosts], ())
        made = [
            NetworkHost(pid, tuple(f"10.77.{n}.{host + 1}" for n in range(networks)))
            for host, pid in enumerate(pids[:hosts])
        ]
        for number in range(networks):
            switch.run("ip", "link", "add", f"bridge{number}", "type", "bridge")
            switch.run("ip", "link", "set", f"bridge{number}", "up")
            for index, host in enumerate(made):
                port = f"port{number}-{index}"
                ends = ("type", "veth", "peer", "name", f"net{number}", "netns", str(host.pid))
                switch.run("ip", "link", "add", port, *ends)
                switch.run("ip", "link", "set", port, "master", f"bridge{number}", "up")
                host.run("ip", "address", "add", f"{host.addresses[number]}/24", "dev", f"net{number}")
                host.run("ip", "link", "set", f"net{number}", "up")
        yield made, [Network(number, f"10.77.{number}.0/24") for number in range(networks)]


def networks_missing() -> str:
    """Return why this machine cannot pretend hosts; empty if it can."""
    missing = [name for name in ("ip", "tc", "unshare", "nsenter") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        return f"needs root and {', '.join(missing) or 'its rights'}"
    try:
        with network_hosts(1) as (hosts, _):
            hosts[0].block()
    except RuntimeError as error:
        return f"needs network namespaces with veth and tc: {error}"
    return ""


@contextlib.contextmanager
def _namespace() -> Iterator[int]:
    own = os.readlink("/proc/self/ns/net")
    with subprocess.Popen(["unshare", "--net", "sleep", "infinity"]) as process:
        try:
            deadline = time.monotonic() + _START_TIMEOUT_SECONDS
            while os.readlink(f"/proc/{process.pid}/ns/net") == own:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("no network namespace could be made")
                time.sleep(0.01)
            _run("nsenter", "--target", str(process.pid), "--net", "ip", "link", "set", "lo", "up")
            yield process.pid
        finally:
            process.kill()


def _enter(descriptor: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
        code = ctypes.get_errno()
        raise OSError(code, f"the network namespace cannot be entered: {os.strerror(code)}")


def _run(*arguments: str) -> None:
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: {done.stderr.strip()}")
