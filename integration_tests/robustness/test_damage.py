"""Random damage to whole checkpoints, ours in every layout and stock's: refused or harmless, never wrong values.

Hypothesis draws what is done to which file: bits, ranges, lengths, missing files, exchanged files, files of an earlier
save. Values of two versions differ everywhere, so that a mixture cannot go unnoticed.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dcp_all as dcp
from dcp_core.errors import CheckpointException, CheckpointNotFoundError, CorruptCheckpointError
from dcp_io import LocalStore, verify_checkpoint
from integration_tests.kits.damage import flip
from integration_tests.oracle.kinds import same_bits
from integration_tests.robustness import states
from integration_tests.robustness.damage import METADATA, data_files, files, payload_bytes, swap

OLD, NEW = 1, 2
Fresh = Callable[[str, int], Path]


@dataclass(frozen=True)
class Hurt:
    """One damage: what is done, to which file, and where in it as a fraction of its length."""

    what: str
    file: int
    at: float
    byte: int

    def apply(self, folder: Path, earlier: Path) -> Path:
        """Do it; the file that is hit."""
        paths = files(folder)
        path = paths[self.file % len(paths)]
        data = bytearray(path.read_bytes())
        position = min(int(self.at * len(data)), len(data) - 1) if data else 0
        if self.what == "flip" and data:
            data[position] ^= self.byte
        elif self.what == "overwrite":
            data[position : position + 64] = bytes([self.byte]) * len(data[position : position + 64])
        elif self.what == "truncate":
            del data[position:]
        elif self.what == "insert":
            data[position:position] = bytes([self.byte])
        elif self.what == "grow":
            data += bytes([self.byte]) * 64
        elif self.what == "stale":
            same = paths.index(path)
            data = bytearray(files(earlier)[same % len(files(earlier))].read_bytes())
        elif self.what == "swap":
            swap(path, paths[(self.file + 1) % len(paths)])
            return path
        path.write_bytes(data)
        if self.what == "remove":
            path.unlink()
        return path


WHAT = ["flip", "overwrite", "truncate", "insert", "grow", "stale", "swap", "remove"]
hurts = st.builds(
    Hurt, st.sampled_from(WHAT), st.integers(0, 9), st.floats(0, 1, exclude_max=True), st.integers(1, 255)
)
common = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in files(folder)}


def is_damaged(name: str, data: bytes, now: dict[str, bytes], known: set[bytes]) -> bool:
    """Whether a file is not as it was; of a rank's index there are two copies, and other indexes may lie around."""
    if re.fullmatch(r"__\d+(\.\w+)?\.metadata", name):
        return name in now and now[name] not in known
    return now.get(name) != data


def names_what_is_wrong(error: Exception, folder: Path) -> bool:
    """Whether the message names a file, and for damage inside a data file also tensor and offset."""
    if isinstance(error, CorruptCheckpointError) and error.file is not None and error.file.endswith(".distcp"):
        return error.key is not None and error.offset is not None and error.file in str(error)
    return ".metadata" in str(error) or ".distcp" in str(error) or str(folder) in str(error)


@pytest.mark.parametrize("kind", ["torch", "raw", "alone", "rank-local"])
def test_ours(fresh: Fresh, made: Fresh, kind: str) -> None:
    @settings(common, max_examples=100)
    @given(st.lists(hurts, min_size=1, max_size=3), st.sampled_from(["blocks", "full", "before"]))
    def check(damage: list[Hurt], verify: Any) -> None:
        folder = fresh(kind, NEW)
        before = contents(folder)
        for hurt in damage:
            hurt.apply(folder, made(kind, OLD))
        error = states.refusal(folder, NEW, verify=verify)
        assert error is None or names_what_is_wrong(error, folder), error
        known = {*before.values(), *contents(made(kind, OLD)).values()}
        if any(is_damaged(name, data, contents(folder), known) for name, data in before.items()):
            assert not verify_checkpoint(LocalStore(folder)).ok, "the damage is not reported"

    check()


def test_stock_written(fresh: Fresh, made: Fresh) -> None:
    """Its index carries no checksum, nor any trace of which data files belong to it: one of the same layout, left
    from an earlier save, cannot be told from the right one. All other damage to data files is refused.
    """

    @settings(common, max_examples=150)
    @given(st.lists(hurts.filter(lambda hurt: hurt.what != "stale"), min_size=1, max_size=3))
    def check(damage: list[Hurt]) -> None:
        folder = fresh("stock", NEW)
        index = (folder / METADATA).read_bytes()
        for hurt in damage:
            hurt.apply(folder, made("stock", OLD))
        (folder / METADATA).write_bytes(index)
        error = states.refusal(folder, NEW)
        assert error is None or names_what_is_wrong(error, folder), error

    check()


def test_stock_index_with_a_flipped_byte(fresh: Fresh) -> None:
    """Nothing vouches for it: what a flip turns into another sound index cannot be told. All else is refused."""
    folder = fresh("stock", NEW)
    path = folder / METADATA
    data = path.read_bytes()
    refused = harmless = 0
    for position in range(0, len(data), 3):
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        template = states.blank()
        reader = dcp.FileSystemReader(folder, thread_count=1)
        try:
            dcp.load(template, storage_reader=reader, no_dist=True)
        except dcp.DcpError:
            refused += 1
        else:
            harmless += same_bits(template, states.values(NEW))
    assert refused > harmless > 0


@pytest.mark.parametrize("kind", ["torch", "raw", "stock"])
def test_every_pair_of_files(fresh: Fresh, made: Fresh, kind: str) -> None:
    """Data files exchanged, missing, empty, or from an earlier save of the same values' shapes."""
    for hurt in ("swap", "remove", "empty", "stale")[: 3 if kind == "stock" else 4]:
        folder = fresh(kind, NEW)
        one, other = data_files(folder)
        if hurt == "swap":
            swap(one, other)
        elif hurt == "remove":
            other.unlink()
        elif hurt == "empty":
            other.write_bytes(b"")
        else:
            other.write_bytes(data_files(made(kind, OLD))[1].read_bytes())
        error = states.refusal(folder, NEW)
        wanted = CheckpointNotFoundError if hurt == "remove" else CorruptCheckpointError
        assert isinstance(error, wanted), hurt
        assert one.name in str(error) or other.name in str(error)
        assert "model." in str(error) or "noise" in str(error) or "step" in str(error), hurt
        assert not verify_checkpoint(LocalStore(folder)).ok


@pytest.mark.parametrize("kind", ["torch", "raw"])
def test_index_of_another_save(fresh: Fresh, made: Fresh, kind: str) -> None:
    folder = fresh(kind, NEW)
    shutil.copy(made(kind, OLD) / METADATA, folder / METADATA)
    error = states.refusal(folder, NEW)
    assert isinstance(error, CheckpointNotFoundError)
    assert ".distcp" in str(error)


def test_index_of_a_rank_is_missing(fresh: Fresh) -> None:
    folder = fresh("rank-local", NEW)
    for path in folder.glob("__1*.metadata"):
        path.unlink()
    error = states.refusal(folder, NEW)
    assert isinstance(error, CheckpointNotFoundError)
    assert "rank" in str(error)


def test_nothing_changes_when_everything_is_checked_before(fresh: Fresh) -> None:
    folder = fresh("raw", NEW)
    file, position = max(payload_bytes(folder))
    flip(folder / file, position)
    template = states.blank()
    reader = dcp.FileSystemReader(folder, verify="before")
    with pytest.raises(CorruptCheckpointError):
        dcp.load(template, storage_reader=reader, no_dist=True)
    assert same_bits(template, states.blank())


def load_on_rank(folder: str) -> str:
    template = states.sharded(0)
    try:
        dcp.load(template, storage_reader=dcp.FileSystemReader(folder))
    except CheckpointException as error:
        return str(error)
    return "loaded"


def test_every_rank_hears_of_it(ranks: Any, fresh: Fresh) -> None:
    """Only rank 1 reads the damaged rows; both ranks refuse, and say what is wrong."""
    folder = fresh("raw", NEW)
    (file, position), (key, offset) = [
        (place, value) for place, value in sorted(payload_bytes(folder).items()) if value[0] == "model.weight"
    ][-1]
    assert file.startswith("__1_")
    flip(folder / file, position)
    for text in ranks.run(2, load_on_rank, str(folder)):
        assert "CorruptCheckpointError" in text
        assert "rank 1" in text
        assert all(fact in text for fact in (file, key, str(offset)))
