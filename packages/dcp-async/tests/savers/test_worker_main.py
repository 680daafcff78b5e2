"""How a worker handles messages that arrive."""

from __future__ import annotations

import os
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from dcp_async import AsyncSaver
from dcp_async.savers import worker_handle
from dcp_async.savers.worker_main import Trainer
from dcp_async.savers.worker_messages import Failed, Forget, read_message, send_message


def _refuse() -> Any:
    raise ModuleNotFoundError("No module named 'only_in_the_trainer'")


class OnlyThere:
    """An object that can be pickled but not unpickled."""

    def __reduce__(self) -> Any:
        return _refuse, ()


class EndedError(BaseException):
    pass


def test_a_message_that_does_not_unpickle_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(status: int) -> None:
        raise EndedError

    monkeypatch.setattr("dcp_async.savers.worker_main._watch", lambda parent: os.pidfd_open(os.getpid()))
    monkeypatch.setattr("dcp_async.savers.worker_main.os._exit", ended)
    ours, theirs = socket.socketpair()
    trainer = Trainer(theirs)

    def listen() -> None:
        with pytest.raises(EndedError):
            trainer.listen(os.getpid())

    listener = threading.Thread(target=listen)
    listener.start()
    with ours, theirs:
        ours.settimeout(10)
        send_message(ours, Forget("before"))
        send_message(ours, OnlyThere())
        answer = read_message(ours)
        assert isinstance(answer, Failed)
        assert (answer.number, "only_in_the_trainer" in answer.failure.text) == (0, True)
        send_message(ours, Forget("after"))
        ours.shutdown(socket.SHUT_WR)
        listener.join()  # while `os._exit` is replaced
    assert trainer.messages.get_nowait() == Forget("before")
    assert trainer.messages.empty()


# A worker that writes to a file, when its priority is lowered, whether it has imported what it needs.
NOTING = """
import os, sys
from pathlib import Path
from dcp_async.savers.worker_main import main
nice = os.nice
def noted(increment):
    Path(sys.argv[1]).write_text(str("dcp_async.savers.worker_save" in sys.modules))
    return nice(increment)
os.nice = noted
main(sys.argv[2:])
"""


def test_a_worker_lowers_its_priority_after_its_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside busy processes, the imports at a low priority take longer than `start_timeout_seconds`."""
    note = tmp_path / "note"
    monkeypatch.setattr(
        worker_handle, "module_command", lambda _, *arguments: [sys.executable, "-c", NOTING, str(note), *arguments]
    )
    with AsyncSaver("process") as saver:
        saver.warm_up()
    assert note.read_text() == "True"
