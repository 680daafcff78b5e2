"""Which hosts have which objects, and what is said if none has one."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcp_exchange.holders import by_what_they_hold, name_in, pack_held, unpack_holders
from dcp_io.stores.host_store import HostFolder
from dcp_manifest import CheckpointNotFoundError, CorruptCheckpointError

NAMES = [f"file-{number:02}" for number in range(11)]
HOSTS = [[0, 2], [1, 3]]


def stores(root: Path, held: list[list[str]]) -> list[HostFolder]:
    made = []
    for number, names in enumerate(held):
        store = HostFolder(root / str(number))
        store.make()
        for name in [*names, "unwanted"]:
            store.publish(name, b"x")
        made.append(store)
    return made


def test_each_host_says_what_it_has(tmp_path: Path) -> None:
    first, second = stores(tmp_path, [NAMES[:6], NAMES[5:]])
    packed = [pack_held(first if rank in HOSTS[0] else second, NAMES) for rank in range(4)]
    assert [len(bits) for bits in packed] == [2] * 4
    found = unpack_holders(NAMES, packed, HOSTS, {})
    assert found == {name: (0,) if place < 5 else (0, 1) if place == 5 else (1,) for place, name in enumerate(NAMES)}


def test_ranks_of_one_machine_with_different_objects_are_apart() -> None:
    assert by_what_they_hold([[0, 1, 4], [2, 3]], [b"a", b"b", b"a", b"a", b"a"]) == ((0, 4), (1,), (2, 3))


def test_names_in_folders_are_found(tmp_path: Path) -> None:
    (tmp_path / "0" / "folder").mkdir(parents=True)
    (store,) = stores(tmp_path, [["folder/file"]])
    assert store.holding(["folder/file", "folder/other", "other", "unwanted"]) == {"folder/file", "unwanted"}


def test_a_rank_of_a_store_for_all_has_all() -> None:
    assert unpack_holders(["a"], [b"\0", None, b"\x80", None], HOSTS, {}) == {"a": (0,)}


def test_bad_copies_are_left_out(tmp_path: Path) -> None:
    first, second = stores(tmp_path, [NAMES, NAMES])
    packed = [pack_held(first if rank in HOSTS[0] else second, NAMES) for rank in range(4)]
    bad = {(NAMES[3], 0): "a CRC does not match"}
    found = unpack_holders(NAMES, packed, HOSTS, bad)
    assert found[NAMES[3]] == (1,)
    assert found[NAMES[4]] == (0, 1)
    bad[NAMES[3], 1] = "it is too short"
    with pytest.raises(CorruptCheckpointError, match=r"rank 0's: a CRC does not match; rank 1's: it is too") as error:
        unpack_holders(NAMES, packed, HOSTS, bad)
    assert error.value.file == NAMES[3]


def test_what_no_host_has_is_named(tmp_path: Path) -> None:
    packed = [pack_held(store, NAMES) for store in stores(tmp_path, [NAMES[:4], NAMES[:4], [], NAMES[5:]])]
    with pytest.raises(CheckpointNotFoundError, match=r"no host of this job has file-04 \(hosts: 2\): load an earlier"):
        unpack_holders(NAMES, packed, HOSTS, {})


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (CorruptCheckpointError("too short", file="file-1"), "file-1"),
        (CheckpointNotFoundError("/run/file-11 is missing"), "file-11"),
        (OSError(5, "Input/output error", "/run/file-1"), "file-1"),
        (ValueError("something else"), None),
    ],
)
def test_errors_name_objects(error: Exception, name: str | None) -> None:
    assert name_in(error, ["file-1", "file-11", "file-2"]) == name
