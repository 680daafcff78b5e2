"""Pickles that would run code or take all memory, wherever a checkpoint can hold one: nothing of them happens."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_all as dcp
from dcp_core.errors import CorruptCheckpointError, UnsafeCheckpointError
from dcp_io import LocalStore, verify_checkpoint
from integration_tests.robustness.crafted import (
    METADATA,
    archive,
    little_memory,
    ours_with_object,
    saved,
    stock_checkpoint,
)
from integration_tests.robustness.hostile_pickles import BOMBS, CODE, whole

REFUSALS = (UnsafeCheckpointError, CorruptCheckpointError)
ROOT = Path(__file__).resolve().parents[2]
TENSOR = torch.arange(6.0)


def as_index(folder: Path, body: bytes) -> None:
    """The whole index."""
    folder.mkdir()
    (folder / METADATA).write_bytes(whole(body))


def in_index(folder: Path, body: bytes) -> None:
    """The entries of an index that is otherwise as stock writes it."""
    stock_checkpoint(folder, saved(TENSOR), saved("harmless"))
    data = (folder / METADATA).read_bytes()
    assert data.endswith(b"ub.")
    field = b"state_dict_metadata"
    (folder / METADATA).write_bytes(data[:-3] + b"X" + len(field).to_bytes(4, "little") + field + body + b"ub.")


def beside_index(folder: Path, body: bytes) -> None:
    """A value that no field of the index needs, as frameworks append them: nothing of it runs, and it is dropped."""
    stock_checkpoint(folder, saved(TENSOR), saved("harmless"))
    data = (folder / METADATA).read_bytes()
    # What is put on the stack and taken away again leaves no trace, if it is read at all.
    (folder / METADATA).write_bytes(data[:-1] + body + b"0.")


def as_object(folder: Path, body: bytes) -> None:
    ours_with_object(folder, archive(whole(body)))


def in_object(folder: Path, body: bytes) -> None:
    """Inside of an object that needs the allow-list as well."""
    ours_with_object(folder, archive(b"\x80\x04](ccollections\nOrderedDict\n)R" + body + b"e."))


def bare_object(folder: Path, body: bytes) -> None:
    """Without an archive around it, as torch saved before there were any."""
    ours_with_object(folder, pickle.dumps(0x1950A86A20F9469CFC6C) + pickle.dumps(1001) + pickle.dumps({}) + whole(body))


def stock_object(folder: Path, body: bytes) -> None:
    stock_checkpoint(folder, saved(TENSOR), archive(whole(body)))


def stock_tensor(folder: Path, body: bytes) -> None:
    stock_checkpoint(folder, archive(whole(body)), saved("harmless"))


PLACES = [as_index, in_index, beside_index, as_object, in_object, bare_object, stock_object, stock_tensor]


def attempts(folder: Path) -> list[Callable[[], object]]:
    """Every way to read a checkpoint."""

    def load() -> object:
        template = {"t": torch.zeros(6), "o": None}
        return dcp.load(template, storage_reader=dcp.FileSystemReader(folder, thread_count=1), no_dist=True)

    return [
        load,
        lambda: dcp.load_keys(storage_reader=dcp.FileSystemReader(folder), no_dist=True),
        lambda: dcp.FileSystemReader(folder).read_metadata(),
        lambda: dcp.latest_valid(folder.parent),
        lambda: verify_checkpoint(LocalStore(folder)),
    ]


def check(folder: Path, *, must_refuse: bool) -> None:
    refusals = []
    for attempt in attempts(folder):
        try:
            attempt()
        except REFUSALS as error:
            refusals.append(error)
    if must_refuse:
        assert refusals, "it was loaded"
    for error in refusals:
        assert len(str(error)) < 4000
        assert METADATA in str(error) or ".distcp" in str(error) or "'o'" in str(error) or "'t'" in str(error), error


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
@pytest.mark.parametrize("name", CODE)
def test_nothing_runs(tmp_path: Path, place: Callable[[Path, bytes], None], name: str) -> None:
    marker = tmp_path / "it-ran"
    folder = tmp_path / "root" / "checkpoint"
    folder.parent.mkdir()
    place(folder, CODE[name](str(marker)))
    check(folder, must_refuse=place is not beside_index)
    assert not marker.exists()


UNRESTRICTED = """
import contextlib, json, os, pickle, sys
from integration_tests.robustness.hostile_pickles import CODE, whole

ran = []
for name, make in CODE.items():
    with contextlib.suppress(Exception):
        pickle.loads(whole(make(sys.argv[1])))
    with contextlib.suppress(FileNotFoundError):
        os.unlink(sys.argv[1])
        ran.append(name)
print(json.dumps(ran))
"""


def test_these_pickles_do_run_where_they_are_not_stopped(tmp_path: Path) -> None:
    """Otherwise the test above would show nothing. Those that are missing need what this process has imported."""
    command = [sys.executable, "-W", "ignore", "-c", UNRESTRICTED, str(tmp_path / "it-ran")]
    ran = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=240).stdout)
    assert {"os.system", "eval", "nested reduce", "pickle.loads", "INST", "OBJ", "GLOBAL", "open"} <= set(ran)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
@pytest.mark.parametrize("name", BOMBS)
def test_nothing_explodes(tmp_path: Path, place: Callable[[Path, bytes], None], name: str) -> None:
    """An object may be as large as its bytes say; what is larger than that is refused."""
    folder = tmp_path / "root" / "checkpoint"
    folder.parent.mkdir()
    place(folder, BOMBS[name])
    with little_memory():
        check(folder, must_refuse=False)


def test_the_head_is_not_read(tmp_path: Path) -> None:
    """A hostile pickle before a sound manifest is for stock alone: ours loads, and verification tells."""
    folder, marker = tmp_path / "checkpoint", tmp_path / "it-ran"
    dcp.save({"t": TENSOR}, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    path = folder / METADATA
    data = path.read_bytes()
    evil = whole(CODE["os.system"](str(marker)))
    path.write_bytes(evil + data[len(evil) :])
    template = {"t": torch.zeros(6)}
    dcp.load(template, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    assert torch.equal(template["t"], TENSOR)
    assert [problem.file for problem in verify_checkpoint(LocalStore(folder)).problems] == [METADATA]
    path.write_bytes(evil + data)
    with pytest.raises(CorruptCheckpointError, match=r"\.metadata"):
        dcp.load(template, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    assert not marker.exists()


@pytest.mark.parametrize("allow", [{"trust_objects": True}, {}])
def test_trust_is_by_name_only(tmp_path: Path, allow: dict[str, Any]) -> None:
    """The one way to run what a checkpoint says is to ask for it."""
    folder, marker = tmp_path / "checkpoint", tmp_path / "it-ran"
    ours_with_object(folder, archive(whole(CODE["os.system"](str(marker)))))
    template = {"t": torch.zeros(6), "o": None}
    planner = dcp.DefaultLoadPlanner(**allow)
    reader = dcp.FileSystemReader(folder)
    if allow:
        dcp.load(template, storage_reader=reader, planner=planner, no_dist=True)
    else:
        with pytest.raises(UnsafeCheckpointError, match=r"os\.system"):
            dcp.load(template, storage_reader=reader, planner=planner, no_dist=True)
    assert marker.exists() == bool(allow)
