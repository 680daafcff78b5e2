"""An upload ends once: it is completed, or cancelled and removed."""

from __future__ import annotations

import pytest

from dcp_io.stores.stream_files import UploadSink


class Toy(UploadSink):
    def __init__(self, broken: str = "") -> None:
        super().__init__("x", "toy://bucket/x")
        self.may_exist = True
        self.broken = broken
        self.told: list[object] = []

    def send(self, view: memoryview) -> None:
        self._tell(bytes(view))

    def complete(self) -> None:
        self._tell("complete")

    def give_up(self) -> None:
        self._tell("give up")

    def remove(self) -> None:
        self._tell("remove")

    def _tell(self, what: object) -> None:
        self.told.append(what)
        if what == self.broken:
            raise OSError(f"no {what}")


def test_an_upload_is_completed_once() -> None:
    sink = Toy()
    sink.write([b"ab", memoryview(b"-c-")[1:2], bytearray()])
    assert (sink.name, sink.sent_bytes) == ("x", 3)
    sink.close()
    sink.close()
    assert sink.told == [b"ab", b"c", b"", "complete"]
    with pytest.raises(ValueError, match="toy://bucket/x has been closed"):
        sink.write([b"d"])


@pytest.mark.parametrize("broken", ["", "give up", "remove"])
def test_giving_up_removes_what_may_exist_and_does_not_raise(broken: str) -> None:
    sink = Toy(broken)
    sink.abort()
    sink.abort()
    assert sink.told == ["give up", "remove"]
    with pytest.raises(ValueError, match="has been closed"):
        sink.write([b"d"])


def test_what_was_completed_is_removed_but_not_given_up() -> None:
    sink = Toy()
    sink.close()
    sink.abort()
    assert sink.told == ["complete", "remove"]


def test_what_is_not_ours_is_left_alone() -> None:
    sink = Toy()
    sink.may_exist = False
    sink.abort()
    assert sink.told == ["give up"]


def test_a_failed_end_can_be_given_up() -> None:
    sink = Toy("complete")
    with pytest.raises(OSError, match="no complete"):
        sink.close()
    sink.abort()
    assert sink.told == ["complete", "remove"]
