"""Command line and life of a keeper's process."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Sequence

from dcp_memory.keeper.options import KeeperOptions, parse_arguments
from dcp_memory.keeper.server import Server
from dcp_memory.places import FOLDER_VARIABLE, KeeperFolder, folder_path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a keeper; returns the exit code.

    Example:
        ```sh
        python -m dcp_memory.keeper my-run --max-bytes 64G --detach
        ```
    """
    options, detach = parse_arguments(arguments)
    keep_streams_open()
    try:
        if detach:
            return run_detached(options)
        run_keeper(options)
    except OSError as error:
        print(error, file=sys.stderr)  # noqa: T201 - a command
        return 1
    return 0


_BACKLOG = 512
_LAST_STREAM = 2
_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def keep_streams_open() -> None:
    """Open `/dev/null` for closed standard streams, so that no output gets into a checkpoint's memory."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= _LAST_STREAM:
        pass
    os.close(opened)


def run_keeper(options: KeeperOptions, ready: int | None = None) -> None:
    """Serve a run until stopped; return immediately if it has a keeper. Raises OSError for an unusable folder."""
    os.umask(0o077)
    with KeeperFolder(folder_path(), make=True) as folder, folder.alone(options.run) as alone:
        if alone:
            _serve(folder, options, ready)
        elif ready is not None:
            _report(ready)


def run_detached(options: KeeperOptions) -> int:
    """Start a keeper in its own session; return the exit code, once it accepts connections or has failed."""
    os.environ[FOLDER_VARIABLE] = folder_path()  # it leaves the working folder, from which the path may start
    answers, ready = os.pipe()
    if os.fork():
        os.close(ready)
        with open(answers, "rb") as pipe:
            said = pipe.read()
        if said != b"+":
            sys.stderr.write(said.decode(errors="replace") or "the keeper ended while it started\n")
        return 0 if said == b"+" else 1
    code, redirected = 1, False
    try:
        os.close(answers)
        os.setsid()
        _redirect(options.run)
        redirected = True
        run_keeper(options, ready)
        code = 0
    except Exception as error:  # noqa: BLE001 - also no memory, or no thread: whatever it is, the caller gets it
        why = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):  # ready already, or no process waits
            os.write(ready, f"{why}\n".encode())
        if redirected:
            traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _serve(folder: KeeperFolder, options: KeeperOptions, ready: int | None) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    path = folder.socket_path(options.run)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    os.chmod(path, 0o600)
    listener.listen(_BACKLOG)
    server = Server(options, listener, lambda: folder.refresh(options.run))
    for each in _ENDS:
        signal.signal(each, lambda *_: server.stop())
    try:
        if ready is not None:
            _report(ready)
        server.serve()
    finally:
        folder.remove(options.run)
        server.close()


def _redirect(run: str) -> None:
    with KeeperFolder(folder_path(), make=True) as folder:
        # Without waiting: a FIFO in the place of the log has no reader.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        log = os.open(f"{run}.log", flags, 0o600, dir_fd=folder.descriptor)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(nothing)
    os.close(log)
    os.chdir("/")


def _report(ready: int) -> None:
    with contextlib.suppress(OSError):
        os.write(ready, b"+")
    os.close(ready)


if __name__ == "__main__":
    sys.exit(main())
