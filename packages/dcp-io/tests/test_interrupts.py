"""A KeyboardInterrupt when a C function returns, where Python raises it: no descriptor and no file is left."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from dcp_io import LocalStore, Store
from dcp_manifest.folders.folder import LocalFolder


def _write(store: Store) -> None:
    sink = store.create("new")
    try:
        sink.write([b"data"])
        sink.close()
    except BaseException:
        sink.abort()
        raise


WORK: dict[str, Callable[[LocalStore], Any]] = {
    "write": _write,
    "publish": lambda store: store.publish("old", b"other"),
    "read": lambda store: store.read("old"),
    "sync": lambda store: store.sync_folder(),
    "index": lambda store: LocalFolder(store.path).read("old"),
}


class _Interrupted(KeyboardInterrupt):
    pass


def _interrupt_at(number: int) -> Callable[[FrameType, str, Any], None]:
    """A profiler that raises when the call of that number returns."""
    left = [number]

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_return" and argument is not sys.setprofile:
            left[0] -= 1
            if left[0] < 0:
                raise _Interrupted

    return profile


def _descriptors() -> set[str]:
    return {os.readlink(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd") if _is_open(each)}


def _is_open(descriptor: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{descriptor}")


@pytest.mark.parametrize("work", WORK)
def test_an_interrupt_at_any_call_leaves_no_descriptor_and_no_file(work: str, tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.publish("old", b"data")
    before, interrupted = _descriptors(), 0
    for number in range(1000):
        sys.setprofile(_interrupt_at(number))
        try:
            WORK[work](store)
        except _Interrupted:
            interrupted += 1
        else:
            break
        finally:
            sys.setprofile(None)
        assert _descriptors() == before, number
        assert {path.name for path in tmp_path.iterdir()} <= {"old"}, number
    assert interrupted == number > 0
