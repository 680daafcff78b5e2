"""Reading and writing of safetensors files and Hugging Face folders, with the plain library as the judge."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dcp_core import (
    CheckpointException,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsupportedFormatError,
    load,
    save,
)
from dcp_core.errors import MissingKeyError, UnsupportedValueError
from dcp_core.testing.trees import same
from dcp_format import HuggingFaceStorageReader, HuggingFaceStorageWriter, WriteOptions, convert
from dcp_format.safetensors.safetensors_index import INDEX_NAME, open_safetensors
from dcp_io import LocalStore


def tensors() -> dict[str, torch.Tensor]:
    return {
        "a": torch.randn(300, 40),
        "b": torch.arange(7, dtype=torch.uint8),
        "c": torch.tensor(2.0),
        "d": torch.randn(5, 3).to(torch.float8_e4m3fn),
        "e": torch.empty(0, 3),
        "f": torch.tensor([True, False]),
        "g": torch.randn(33, 7, dtype=torch.bfloat16),
    }


def folder(path: Path, value: dict[str, torch.Tensor]) -> Path:
    """A Hugging Face folder of two files."""
    path.mkdir()
    names = sorted(value)
    halves = {"model-00001-of-00002.safetensors": names[:3], "model-00002-of-00002.safetensors": names[3:]}
    for file, part in halves.items():
        save_file({name: value[name] for name in part}, path / file)
    weight_map = {name: file for file, part in halves.items() for name in part}
    (path / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def blank(value: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(each) for name, each in value.items()}


def test_load_from_a_folder_and_a_file(tmp_path: Path) -> None:
    value = tensors()
    place = folder(tmp_path / "hf", value)
    for path in (place, place / INDEX_NAME):
        template = blank(value)
        report = load(template, storage_reader=HuggingFaceStorageReader(path))
        assert same(template, value)
        assert set(report.unverified) >= {"a", "g"}
    save_file(value, tmp_path / "one.safetensors")
    template = blank(value)
    load(template, storage_reader=HuggingFaceStorageReader(tmp_path / "one.safetensors", thread_count=2))
    assert same(template, value)


def test_an_index_that_is_named_is_followed(tmp_path: Path) -> None:
    for number, name in enumerate(("model", "ema"), 1):
        save_file({"w": torch.full((3,), float(number))}, tmp_path / f"{name}.safetensors")
        index = {"weight_map": {"w": f"{name}.safetensors"}}
        (tmp_path / f"{name}.safetensors.index.json").write_text(json.dumps(index))
    for number, name in enumerate(("model", "ema"), 1):
        place = tmp_path / f"{name}.safetensors.index.json"
        template = {"w": torch.zeros(3)}
        load(template, storage_reader=HuggingFaceStorageReader(place))
        assert template["w"].tolist() == [number] * 3
        assert convert(place, tmp_path / f"{name}.pt").format == "torch"
        assert torch.load(tmp_path / f"{name}.pt", weights_only=True)["w"].tolist() == [number] * 3
    (tmp_path / "ema.safetensors").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"that ema\.safetensors\.index\.json names"):
        open_safetensors(tmp_path / "ema.safetensors.index.json")
    with pytest.raises(CheckpointNotFoundError, match=r"no index .*other\.safetensors\.index\.json"):
        open_safetensors(tmp_path / "other.safetensors.index.json")


def test_save_gives_a_folder_that_the_library_opens(tmp_path: Path) -> None:
    value = tensors()
    mapping = {name: 1 + number % 2 for number, name in enumerate(value)}
    save(value, storage_writer=HuggingFaceStorageWriter(str(tmp_path / "hf"), mapping, thread_count=2))
    weight_map = json.loads((tmp_path / "hf" / INDEX_NAME).read_text())["weight_map"]
    loaded: dict[str, torch.Tensor] = {}
    for file in set(weight_map.values()):
        loaded |= load_file(tmp_path / "hf" / file)
    assert same(loaded, value)
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        INDEX_NAME,
    ]


def test_saving_again_leaves_no_old_files(tmp_path: Path) -> None:
    value = tensors()
    mapping = {name: 1 + number % 3 for number, name in enumerate(value)}
    save(value, storage_writer=HuggingFaceStorageWriter(str(tmp_path), mapping))
    save({"a": value["a"]}, storage_writer=HuggingFaceStorageWriter(str(tmp_path)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model-00001-of-00001.safetensors", INDEX_NAME]


def test_files_of_others_stay(tmp_path: Path) -> None:
    place = tmp_path / "model.hf"
    place.mkdir()
    save_file({"lora": torch.ones(3)}, place / "adapter.safetensors")
    value = tensors()
    torch.save(value, tmp_path / "value.pt")
    mapping = {name: 1 + number % 3 for number, name in enumerate(value)}
    for numbers in (mapping, None):
        save(value, storage_writer=HuggingFaceStorageWriter(str(place), numbers))
        assert same(loaded(place, value), value)
        convert(tmp_path / "value.pt", place, options=WriteOptions(overwrite=True))
        assert same(loaded(place, value), value)
    assert sorted(path.name for path in place.glob("*.safetensors")) == ["adapter.safetensors", "model.safetensors"]
    assert set(open_safetensors(place).index.tensor_names) == set(value)  # the adapter's tensor is not the model's


def loaded(path: Path, value: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    template = blank(value)
    load(template, storage_reader=HuggingFaceStorageReader(path))
    return template


class Crash(BaseException):
    pass


@pytest.fixture
def crash(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], contextlib.AbstractContextManager[None]]:
    """`with crash(n):` dies before the renaming number n + 1, and cleans nothing up."""

    @contextlib.contextmanager
    def crashing(after: int) -> Iterator[None]:
        real, renamed = os.replace, []

        def replace(source: object, destination: object) -> None:
            if len(renamed) == after:
                raise Crash
            renamed.append(destination)
            real(str(source), str(destination))

        def delete(self: LocalStore, name: str) -> None:
            if len(renamed) < after:
                (Path(self.path) / name).unlink(missing_ok=True)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", replace)
            patch.setattr(LocalStore, "delete", delete)
            with pytest.raises((CheckpointException, Crash)):
                yield

    return crashing


def write_as(kind: str, place: Path, value: dict[str, torch.Tensor]) -> None:
    mapping = {name: 1 + number % 3 for number, name in enumerate(value)}
    if kind == "converted":
        torch.save(value, place.parent / "value.pt")
        convert(place.parent / "value.pt", place, options=WriteOptions(overwrite=True, max_file_bytes=8))
    else:
        sharded = kind == "sharded"
        save(value, storage_writer=HuggingFaceStorageWriter(str(place), mapping, save_distributed=sharded))


KINDS = ["whole", "sharded", "converted"]


@pytest.mark.parametrize("crash_after", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_first_save_that_crashes_leaves_nothing_that_loads(
    tmp_path: Path, crash: Any, kind: str, crash_after: int
) -> None:
    place, value = tmp_path / "model.hf", tensors()
    place.mkdir()
    with crash(crash_after):
        write_as(kind, place, value)
    assert len([*place.glob("*.safetensors")]) == crash_after
    with pytest.raises(CheckpointNotFoundError, match="interrupted" if crash_after else "there is no"):
        open_safetensors(place)
    write_as(kind, place, value)
    assert same(loaded(place, value), value)


@pytest.mark.parametrize("crash_after", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_save_that_crashes_leaves_the_old_files(tmp_path: Path, crash: Any, kind: str, crash_after: int) -> None:
    place, old = tmp_path / "model.hf", tensors()
    new = {name: torch.zeros_like(value) for name, value in old.items()}
    write_as(kind, place, old)
    count = len([*place.glob("*.safetensors")])
    with crash(crash_after):
        write_as(kind, place, new)
    assert same(loaded(place, old), old)
    write_as(kind, place, new)
    assert same(loaded(place, old), new)
    assert len([*place.glob("*.safetensors")]) == count


@pytest.mark.parametrize(("first", "second"), [(a, b) for a in KINDS for b in KINDS])
def test_any_writer_replaces_the_files_of_any_other(tmp_path: Path, first: str, second: str) -> None:
    place, old = tmp_path / "model.hf", tensors()
    new = {name: torch.zeros_like(value) for name, value in old.items()}
    write_as(first, place, old)
    write_as(second, place, new)
    assert same(loaded(place, old), new)
    assert (place / INDEX_NAME).exists() is (second != "sharded")


def test_files_of_two_saves_are_refused(tmp_path: Path) -> None:
    """Files that say nothing of their number or generation, as earlier versions wrote them."""
    for number, save_id in ((1, "a"), (2, "b")):
        name = tmp_path / f"model-0000{number}-of-00002.safetensors"
        save_file({f"t{number}": torch.ones(3)}, name, {"DCP_SAVE_ID": save_id})
    with pytest.raises(CorruptCheckpointError, match="two saves"):
        open_safetensors(tmp_path)


def test_tied_tensors_are_kept(tmp_path: Path) -> None:
    weight = torch.randn(4, 4)
    save({"in": weight, "out": weight}, storage_writer=HuggingFaceStorageWriter(str(tmp_path)))
    loaded = load_file(tmp_path / "model-00001-of-00001.safetensors")
    assert same(loaded, {"in": weight, "out": weight})
    assert open_safetensors(tmp_path).index.alias_names == ["out"]


@pytest.mark.parametrize("change", ["last byte", "shape", "dtype", "removed"])
def test_a_tie_that_does_not_hold_any_more_is_none(tmp_path: Path, change: str) -> None:
    """Another program changes a tensor and saves with the metadata that it found."""
    weight = torch.arange(1_500_000.0)  # longer than what is compared at once
    torch.save({"a": weight, "b": weight, "c": weight}, tmp_path / "tied.pt")
    convert(tmp_path / "tied.pt", tmp_path / "tied.safetensors")
    with safe_open(tmp_path / "tied.safetensors", "pt") as file:
        metadata = file.metadata()
        value = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - it is no mapping
    if change == "last byte":
        value["b"][-1] += 1
    elif change == "removed":
        del value["b"]
    else:
        value["b"] = value["b"].view(2, -1) if change == "shape" else value["b"].view(torch.int32)
    save_file(value, tmp_path / "edited.safetensors", metadata)
    template = blank(value)
    load(template, storage_reader=HuggingFaceStorageReader(tmp_path / "edited.safetensors"))
    assert same(template, value)
    assert open_safetensors(tmp_path / "edited.safetensors").index.alias_names == ["c"]
    convert(tmp_path / "edited.safetensors", tmp_path / "edited.pt")
    assert same(torch.load(tmp_path / "edited.pt", weights_only=True), value)


def test_objects_and_unknown_dtypes_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"'step' is not a tensor: leave"):
        save({"w": torch.ones(3), "step": 7}, storage_writer=HuggingFaceStorageWriter(str(tmp_path)))
    with pytest.raises(Exception, match=r"'w' has dtype complex128"):
        save({"w": torch.ones(3, dtype=torch.complex128)}, storage_writer=HuggingFaceStorageWriter(str(tmp_path)))
    assert list(tmp_path.iterdir()) == []


def test_arguments_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="save_distributed"):
        HuggingFaceStorageWriter(str(tmp_path), enable_consolidation=True)
    with pytest.raises(ValueError, match="from 1 on"):
        HuggingFaceStorageWriter(str(tmp_path), {"w": 0})
    with pytest.raises(Exception, match="does not say which file 'w'"):
        save({"w": torch.ones(3)}, storage_writer=HuggingFaceStorageWriter(str(tmp_path), {"v": 1}))
    assert issubclass(MissingKeyError, KeyError)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    place = folder(tmp_path / "hf", tensors())
    (place / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"model-00002-of-00002\.safetensors is missing"):
        open_safetensors(place)
    with pytest.raises(CheckpointNotFoundError, match="check the path"):
        open_safetensors(tmp_path / "nowhere")


def test_a_missing_shard_is_an_error(tmp_path: Path) -> None:
    for rank in (1, 3):
        save_file({f"w{rank}": torch.ones(3)}, tmp_path / f"shard-{rank:05d}-model-00001-of-00001.safetensors")
    with pytest.raises(CheckpointNotFoundError, match="shard 2"):
        open_safetensors(tmp_path)


def header(table: dict[str, Any], data: bytes = b"") -> bytes:
    text = json.dumps(table).encode()
    return len(text).to_bytes(8, "little") + text + data


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "no safetensors file"),
    "long": ((1 << 62).to_bytes(8, "little") + b"{}", "truncated or no safetensors"),
    "no json": ((4).to_bytes(8, "little") + b"abcd", "header is damaged"),
    "list": ((2).to_bytes(8, "little") + b"[]", "header is damaged"),
    "short data": (header({"w": F32}, b"1234"), "describes"),
    "more data": (header({"w": F32}, b"123456789"), "describes"),
    "hole": (header({"w": {**F32, "data_offsets": [8, 16]}}, bytes(16)), "holes"),
    "overlap": (header({"w": F32, "v": F32}, bytes(8)), "overlap"),
    "size": (header({"w": {**F32, "shape": [3]}}, bytes(8)), "does not fit"),
    "negative": (header({"w": {**F32, "shape": [-2]}}, bytes(8)), "natural number"),
    "true": (header({"w": {**F32, "shape": [True, 2]}}, bytes(8)), "natural number"),
    "no dtype": (header({"w": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8)), "header is damaged"),
    "metadata": (header({"__metadata__": {"a": 1}}), "__metadata__"),
    "twice": ((2 + 14).to_bytes(8, "little") + b'{"a": 1,"a": 2 }', "twice"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers_are_refused(tmp_path: Path, case: str) -> None:
    data, message = HOSTILE[case]
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=message):
        open_safetensors(tmp_path / "x.safetensors")


def test_unknown_dtype_and_hostile_index(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(header({"w": {**F32, "dtype": "F7"}}, bytes(8)))
    with pytest.raises(UnsupportedFormatError, match="F7"):
        open_safetensors(tmp_path / "x.safetensors")
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"w": "../x.safetensors"}}))
    with pytest.raises(CorruptCheckpointError, match="no plain name"):
        open_safetensors(tmp_path)
    (tmp_path / INDEX_NAME).write_text("{")
    with pytest.raises(CorruptCheckpointError, match="index is damaged"):
        open_safetensors(tmp_path)


def test_one_tensor_in_two_files_is_an_error(tmp_path: Path) -> None:
    for name in "xy":
        save_file({"w": torch.ones(3)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CorruptCheckpointError, match="in two files"):
        open_safetensors(tmp_path)


def test_a_part_that_ranks_wrote_needs_the_others(tmp_path: Path) -> None:
    meta = {
        "DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [0, 0]}}),
        "DCP_GLOBAL_SHAPES": json.dumps({"w": [4, 2]}),
    }
    save_file({"w": torch.ones(2, 2)}, tmp_path / "shard-00001-model-00001-of-00001.safetensors", metadata=meta)
    with pytest.raises(Exception, match="no data for"):
        load({"w": torch.zeros(4, 2)}, storage_reader=HuggingFaceStorageReader(tmp_path))
    assert UnsupportedValueError is not None
