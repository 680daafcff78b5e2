"""Stored objects that are read without torch: plain values come back equal, everything else is refused."""

from __future__ import annotations

import io
import pickle
import zipfile
from typing import Any

import pytest

from dcp_io.archives.stored_objects import read_plain_object
from dcp_manifest import CorruptCheckpointError
from dcp_manifest.pickles.pickle_table import ForbiddenGlobalError

VALUES: list[Any] = [
    None, True, -1, 1 << 80, 0.1, -0.0, "text ä", b"bytes", [1, [2]], (1, (2,)), {3, 4}, frozenset({5}),
    {"a": {1: [None]}, (1, 2): "tuple"}, [], {}, "x" * 100_000,
]  # fmt: skip


def archive(value: Any, *, protocol: int = 2, name: str = "archive/data.pkl") -> bytes:
    into = io.BytesIO()
    with zipfile.ZipFile(into, "w") as made:
        made.writestr(name, pickle.dumps(value, protocol))
        made.writestr("archive/version", "3")
    return into.getvalue()


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize("value", VALUES, ids=lambda each: type(each).__name__)
def test_plain_values(value: Any, protocol: int) -> None:
    read = read_plain_object(archive(value, protocol=protocol))
    assert (type(read), repr(read)) == (type(value), repr(value))


def test_what_torch_saves() -> None:
    torch = pytest.importorskip("torch")
    for value in VALUES[:8] + VALUES[12:]:
        into = io.BytesIO()
        torch.save(value, into)
        if isinstance(value, bytes):  # pickled as a call of a function, under torch's protocol
            continue
        assert read_plain_object(into.getvalue()) == value


@pytest.mark.parametrize("value", [pickle.Unpickler, print, 1j, bytearray(b"x")], ids=repr)
def test_whatever_names_a_class_is_refused(value: Any) -> None:
    with pytest.raises(ForbiddenGlobalError):
        read_plain_object(archive(value))


def test_hostile_and_broken_bytes() -> None:
    doubled: list[Any] = []
    for _ in range(60):
        doubled = [doubled, doubled]
    with pytest.raises(ValueError, match="shared too often"):
        read_plain_object(archive(doubled))
    with pytest.raises(CorruptCheckpointError, match="no archive"):
        read_plain_object(archive(1, name="archive/other"))
    for broken in (b"", b"PK", archive(VALUES)[:100]):
        with pytest.raises(ValueError, match="archive"):
            read_plain_object(broken)
