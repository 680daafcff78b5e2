"""`FileSystemWriter` and `FileSystemReader` on a real folder, in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_core import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DefaultSavePlanner,
    LoadReport,
    UnsupportedValueError,
    load,
    save,
)
from dcp_fs import FileSystemReader, FileSystemWriter, SerializationFormat
from integration_tests.kits.damage import flip

LAYOUTS = ["torch", "raw"]


def state(value: float = 1.0) -> dict[str, Any]:
    return {
        "big": torch.full((300, 1000), value),
        "small": torch.tensor(value),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "object": {"value": value},
        "empty": torch.empty(0),
    }


def blank() -> dict[str, Any]:
    return {**{k: torch.zeros_like(v) for k, v in state().items() if k != "object"}, "object": {"value": None}}


def read(folder: Path, **options: Any) -> tuple[dict[str, Any], LoadReport]:
    template = blank()
    return template, load(template, storage_reader=FileSystemReader(folder, **options))


def assert_holds(folder: Path, value: float) -> None:
    template, _ = read(folder)
    wanted = state(value)
    assert template["object"] == wanted["object"]
    assert all(torch.equal(template[key], wanted[key]) for key in wanted if key != "object")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("single_file", [True, False])
@pytest.mark.parametrize("threads", [1, 3])
def test_round_trip(tmp_path: Path, layout: Any, single_file: bool, threads: int) -> None:
    writer = FileSystemWriter(tmp_path / "c", single_file, thread_count=threads, layout=layout)
    save(state(), storage_writer=writer)
    assert_holds(tmp_path / "c", 1.0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_saving_again_replaces_and_leaves_no_debris(tmp_path: Path, layout: Any) -> None:
    for value in (1.0, 2.0, 3.0):
        save(state(value), storage_writer=FileSystemWriter(tmp_path, layout=layout))
        assert_holds(tmp_path, value)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names[0] == ".metadata"
    assert len({name.split(".")[1] for name in names[1:]}) == 1
    assert all(name.endswith(".distcp") for name in names[1:])


def test_refuses_to_overwrite_on_request(tmp_path: Path) -> None:
    save(state(1.0), checkpoint_id=tmp_path)
    with pytest.raises(FileExistsError, match="overwrite"):
        save(state(2.0), storage_writer=FileSystemWriter(tmp_path, overwrite=False))
    assert_holds(tmp_path, 1.0)


def test_failed_save_keeps_the_old_checkpoint_and_removes_its_own_files(tmp_path: Path) -> None:
    class Broken(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            if write_item.index.fqn == "small":
                raise OSError("the device is gone")
            return super().resolve_data(write_item)

    save(state(1.0), checkpoint_id=tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(OSError, match="the device is gone"):
        save(state(2.0), storage_writer=FileSystemWriter(tmp_path), planner=Broken())
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert_holds(tmp_path, 1.0)
    save(state(2.0), checkpoint_id=tmp_path)
    assert_holds(tmp_path, 2.0)


def test_one_writer_serves_many_saves(tmp_path: Path) -> None:
    writer = FileSystemWriter(tmp_path / "unused")
    for value in (1.0, 2.0):
        save(state(value), checkpoint_id=tmp_path / str(value), storage_writer=writer)
        assert writer.checkpoint_id == tmp_path / str(value)
    assert_holds(tmp_path / "1.0", 1.0)
    assert_holds(tmp_path / "2.0", 2.0)
    assert not (tmp_path / "unused").exists()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("verify", ["blocks", "full", "before", True])
def test_flipped_bits_are_refused_with_file_key_and_offset(tmp_path: Path, layout: Any, verify: Any) -> None:
    save(state(), storage_writer=FileSystemWriter(tmp_path, layout=layout, thread_count=1))
    (data,) = tmp_path.glob("*.distcp")
    content = bytearray(data.read_bytes())
    place = len(content) // 2
    content[place] ^= 4
    data.write_bytes(content)
    with pytest.raises(CorruptCheckpointError) as caught:
        read(tmp_path, verify=verify)
    error = caught.value
    assert (error.key, error.file) == ("big", data.name)
    assert error.offset is not None
    assert error.offset <= place
    read(tmp_path, verify=False)


def test_checking_before_changes_nothing(tmp_path: Path) -> None:
    save(state(), storage_writer=FileSystemWriter(tmp_path, thread_count=1))
    (data,) = tmp_path.glob("*.distcp")
    flip(data)
    template = blank()
    with pytest.raises(CorruptCheckpointError):
        load(template, storage_reader=FileSystemReader(tmp_path, verify="before"))
    assert template["big"].count_nonzero() == 0
    assert template["bytes"].count_nonzero() == 0
    assert template["object"] == {"value": None}


def test_missing_files_are_named(tmp_path: Path) -> None:
    save(state(), storage_writer=FileSystemWriter(tmp_path, thread_count=1))
    (data,) = tmp_path.glob("*.distcp")
    data.unlink()
    with pytest.raises(CheckpointNotFoundError, match=data.name):
        read(tmp_path)


def test_no_checkpoint_there(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointNotFoundError, match=str(folder)):
            read(folder)


def test_a_parent_folder_names_the_newest_checkpoint_below_it(tmp_path: Path) -> None:
    for step in (1, 3, 2):
        save({"a": 1}, checkpoint_id=tmp_path / "runs" / f"step-{step}")
    with pytest.raises(CheckpointNotFoundError, match=r"below it there is .*runs/step-3, the newest of 3"):
        load({"a": 0}, checkpoint_id=tmp_path)


def test_values_that_cannot_be_saved_make_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedValueError, match="'x'"):
        save({"x": torch.ones(1, device="meta")}, checkpoint_id=tmp_path / "c")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layout": "zip"}, "'torch', 'raw'"),
        ({"thread_count": 0}, "thread_count"),
        ({"serialization_format": SerializationFormat.SAFETENSORS}, "layout='raw'"),
        ({"_extensions": [object()]}, "_extensions"),
    ],
)
def test_options_are_checked(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FileSystemWriter(tmp_path, **options)
    with pytest.raises(ValueError, match="verify"):
        FileSystemReader(tmp_path, verify="maybe")  # type: ignore[arg-type]


def test_the_same_folder_by_any_kind_of_id(tmp_path: Path) -> None:
    save({"a": torch.ones(2)}, checkpoint_id=f"file://{tmp_path}")
    for checkpoint_id in (tmp_path, str(tmp_path), f"file://{tmp_path}"):
        template = {"a": torch.zeros(2)}
        load(template, checkpoint_id=checkpoint_id)
        assert torch.equal(template["a"], torch.ones(2))


def test_reads_only_what_is_wanted(tmp_path: Path) -> None:
    save({"a": torch.ones(1 << 20), "b": torch.ones(1 << 20)}, checkpoint_id=tmp_path)
    report = load({"a": torch.zeros(1 << 20)}, checkpoint_id=tmp_path)
    assert report.unexpected == ("b",)
    assert 4 << 20 <= report.bytes_read < 5 << 20


@pytest.mark.parametrize("limit", [1, 1 << 20, 1 << 30])
def test_any_buffer_limit_gives_the_same(tmp_path: Path, limit: int) -> None:
    save(state(), storage_writer=FileSystemWriter(tmp_path))
    template, _ = read(tmp_path, max_inflight_bytes=limit)
    assert all(torch.equal(template[key], value) for key, value in state().items() if key != "object")


def test_a_buffer_limit_must_be_positive(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_inflight_bytes=0"):
        FileSystemReader(tmp_path, max_inflight_bytes=0)
