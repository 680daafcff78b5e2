"""Main program of a `RankPool` rank process.

Source: Linux `prctl(2)`, PR_SET_PDEATHSIG.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib.abc
import importlib.machinery
import importlib.util
import os
import pickle
import queue
import re
import resource
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any, TypeAlias

import cloudpickle
import torch
import torch.distributed as dist

from dcp_ranks.testing.rank_messages import Call, Done, Join, Raised

__all__ = ["die_with", "main"]

_PR_SET_PDEATHSIG = 1

_Filter: TypeAlias = "tuple[Any, re.Pattern[str] | str | None, type[Warning], re.Pattern[str] | str | None, int]"


def main(arguments: Sequence[str]) -> None:
    """Run functions until the pool closes the connection; `arguments`: descriptor, process id of the pool."""
    descriptor, parent = map(int, arguments)
    die_with(parent)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()  # the pool ends a stuck process by SIGABRT, to get its stack
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    torch.set_num_threads(1)
    connection = Connection(descriptor)
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, messages), daemon=True).start()
    worker = _Worker(connection)
    while True:
        message = messages.get()
        reply = worker.reply_to(message)
        sys.stdout.flush()
        sys.stderr.flush()
        _save_coverage()
        connection.send(reply)


def _save_coverage() -> None:
    """Save what coverage.py measured so far, if it runs: the kernel kills a rank with its pool."""
    module: Any = sys.modules.get("coverage")
    if module is not None and (running := module.Coverage.current()) is not None:
        running.save()


def die_with(parent: int) -> None:
    """Have the kernel kill this process with its parent."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(1)


def _listen(connection: Connection, messages: queue.SimpleQueue[Any]) -> None:
    try:
        while True:
            messages.put(connection.recv())
    except (EOFError, ConnectionError):
        os._exit(1)


class _Worker:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._finder = _FileFinder()
        sys.meta_path.append(self._finder)

    def reply_to(self, message: Join | Call) -> Done | Raised:
        try:
            if isinstance(message, Join):
                self._join(message)
                return Done(pickle.dumps(None))
            return Done(self._call(message))
        except BaseException as error:  # noqa: BLE001 - SystemExit and pytest's own outcomes are reported too
            return _raised(error)

    def _join(self, message: Join) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        if message.backend is None:
            return
        timeout = timedelta(seconds=message.timeout_seconds)
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", message.port or 0, None, message.port is None, timeout=timeout, wait_for_workers=False
        )
        if message.port is None:
            self._connection.send(Done(pickle.dumps(store.port)))
        if message.backend != "gloo" and torch.accelerator.is_available():
            module: Any = torch.get_device_module()
            module.set_device(message.rank % module.device_count())
        dist.init_process_group(
            message.backend, store=store, rank=message.rank, world_size=message.world_size, timeout=timeout
        )

    def _call(self, message: Call) -> bytes:
        sys.path.extend(entry for entry in message.sys_path if entry not in sys.path)
        self._finder.files.update(message.modules)
        with _clean_slate(), warnings.catch_warnings():
            _set_filters(cloudpickle.loads(message.filters))
            function, arguments = cloudpickle.loads(message.function)
            return bytes(cloudpickle.dumps(function(*arguments)))


class _FileFinder(importlib.abc.MetaPathFinder):
    """Find modules in the pool's files, which may not be on the path."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in self.files:
            return importlib.util.spec_from_file_location(fullname, self.files[fullname])
        if any(name.startswith(f"{fullname}.") for name in self.files):
            spec = importlib.machinery.ModuleSpec(fullname, None, is_package=True)
            spec.submodule_search_locations = []
            return spec
        return None


@contextlib.contextmanager
def _clean_slate() -> Iterator[None]:
    environment, folder, dtype = dict(os.environ), os.getcwd(), torch.get_default_dtype()
    torch.manual_seed(0)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        torch.set_default_dtype(dtype)
        sys.stdout.flush()


def _set_filters(filters: Sequence[_Filter]) -> None:
    warnings.resetwarnings()
    for action, message, category, module, line in reversed(filters):
        warnings.filterwarnings(
            action,
            message=_pattern(message),
            category=category,
            module=_pattern(module),
            lineno=line,
        )


def _pattern(matcher: re.Pattern[str] | str | None) -> str:
    if isinstance(matcher, re.Pattern):
        return matcher.pattern
    return "" if matcher is None else re.escape(matcher)  # the interpreter's default filters contain plain strings


def _raised(error: BaseException) -> Raised:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    try:
        data = cloudpickle.dumps(error)
        cloudpickle.loads(data)
    except Exception:  # noqa: BLE001 - pickling runs the exception's own code
        data = None
    return Raised(text, data)
