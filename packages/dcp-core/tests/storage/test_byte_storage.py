from __future__ import annotations

import contextlib
import gc
import sys
import threading
from typing import Any

from dcp_core.storage.byte_storage import collector_paused


def test_the_collector_runs_again_afterwards() -> None:
    assert gc.isenabled()
    with contextlib.suppress(KeyError), collector_paused():
        assert not gc.isenabled()
        _ = {}["missing"]
    assert gc.isenabled()


def test_whoever_had_it_off_keeps_it_off() -> None:
    gc.disable()
    try:
        with collector_paused(), collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_pauses_of_several_threads_overlap() -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with collector_paused():
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    with collector_paused():
        thread.start()
        assert inside.wait(60)
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_the_collector_runs_after_an_interrupt_at_any_moment() -> None:
    def look(frame: Any, event: str, _: object) -> None:
        nonlocal left
        if event in ("call", "c_return") and "byte_storage" in frame.f_code.co_filename:
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

    interrupted = 0
    for moment in range(1, 40):
        left = moment
        sys.setprofile(look)
        try:
            with collector_paused():
                pass
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.setprofile(None)
        assert gc.isenabled(), moment
    assert 5 < interrupted < 39
