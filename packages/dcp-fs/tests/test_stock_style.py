"""Writers and readers that are subclassed and changed like stock's: every attribute that is set takes effect."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_core import CheckpointNotFoundError, SavePlan, load, save
from dcp_core.errors import DcpError
from dcp_core.storage import storage_writer
from dcp_core.tables.metadata_columns import written_index
from dcp_core.tables.plan_columns import written_of
from dcp_fs import FileSystem, FileSystemBase, FileSystemReader, FileSystemWriter, SerializationFormat
from dcp_manifest.file.manifest_write import encode

STATE = {"w": torch.arange(1000.0), "b": torch.ones(3), "n": {"step": 7, "name": "x"}}
CALLS: list[tuple[str, str]] = []
BUCKET: dict[str, bytes] = {}


@pytest.fixture(autouse=True)
def forget() -> None:
    CALLS.clear()
    BUCKET.clear()


class NotingFileSystem(FileSystem):
    """The local file system, which records the files that it opens."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:  # type: ignore[override]
        CALLS.append((str(path), mode))
        with super().create_stream(path, mode) as stream:
            yield stream


class Upload:
    """An upload stream whose `write` takes only bytes and returns nothing; success makes its object visible."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def write(self, data: bytes) -> None:
        assert isinstance(data, bytes)
        self.parts.append(data)


class Download(io.BytesIO):
    """A stream that cannot seek to its end, and reads only the requested bytes."""

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        if whence == io.SEEK_END:
            raise ValueError("whence must be SEEK_CUR or SEEK_SET")
        return super().seek(offset, whence)


class BucketFileSystem(FileSystemBase):
    """Objects in memory, without folders or listing; has its own error for missing ones; renames may not replace."""

    def __init__(self, *, rename: str = "refuses") -> None:
        self.rename_kind = rename

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:  # type: ignore[override]
        CALLS.append((str(path), mode))
        if mode == "wb":
            stream = Upload()
            yield stream
            BUCKET[path] = b"".join(stream.parts)
        elif path not in BUCKET:
            raise PermissionError("no such object, or not yours")
        else:
            yield Download(BUCKET[path])

    def concat_path(self, path: Any, suffix: str) -> str:
        return f"{path}/{suffix}"

    def rename(self, path: Any, new_path: Any) -> None:
        if new_path in BUCKET and self.rename_kind != "replaces":
            if self.rename_kind == "refuses":
                raise ValueError("there is one")
            return
        BUCKET[new_path] = BUCKET.pop(path)

    def init_path(self, path: Any) -> str:
        return str(path).rstrip("/")

    def mkdir(self, path: Any) -> None:
        del path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return str(checkpoint_id).startswith("bucket://")

    def exists(self, path: Any) -> bool:
        return path in BUCKET

    def rm_file(self, path: Any) -> None:
        del BUCKET[path]


@dataclasses.dataclass
class Prefix:
    """Storage data of a subclass."""

    prefix: str


class StockWriter(FileSystemWriter):
    """Overrides methods as s3torchconnector and other packages do."""

    def __init__(self, path: str, fs: Any, **options: Any) -> None:
        super().__init__(path, sync_files=False, **options)
        self.fs = fs
        self.path = self.fs.init_path(path)


class CountingWriter(FileSystemWriter):
    """Reads the results after the base class has used them."""

    def finish(self, metadata: Any, results: Any) -> None:
        super().finish(metadata, results)
        self.written_bytes = sum(result.size_in_bytes for of_rank in results for result in of_rank)


class WrappingWriter(FileSystemWriter):
    """Reads the results after the writer that it wraps has used them."""

    def __init__(self, path: str) -> None:
        self.wrapped = FileSystemWriter(path)

    def __getattribute__(self, name: str) -> Any:
        own = name in ("wrapped", "finish", "written_bytes", "__dict__")
        return object.__getattribute__(self, name) if own else getattr(self.wrapped, name)

    def finish(self, metadata: Any, results: Any) -> None:
        self.wrapped.finish(metadata, results)
        self.written_bytes = sum(result.size_in_bytes for of_rank in results for result in of_rank)


class PrefixWriter(StockWriter):
    """Puts each rank's files into a folder; its override does not call the base class's method."""

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [dataclasses.replace(plan, storage_data=Prefix(f"part{n}/__{n}_")) for n, plan in enumerate(plans)]


class StockReader(FileSystemReader):
    def __init__(self, path: str, fs: Any) -> None:
        super().__init__(path)
        self.fs = fs
        self.path = self.fs.init_path(path)


class SortingReader(StockReader):
    """Looks up the locations of items, like readers that prefetch."""

    def prepare_local_plan(self, plan: Any) -> Any:
        plan.items.sort(key=lambda item: self.storage_data[item.storage_index].offset)
        return plan


FILE_SYSTEMS: dict[str, Callable[[], Any]] = {
    "local": NotingFileSystem,
    "refusing": BucketFileSystem,
    "ignoring": lambda: BucketFileSystem(rename="ignores"),
    "replacing": lambda: BucketFileSystem(rename="replaces"),
}


def template() -> dict[str, Any]:
    return {"w": torch.zeros(1000), "b": torch.zeros(3), "n": {"step": 0, "name": ""}}


def same(found: dict[str, Any], factor: float = 1.0) -> bool:
    return bool(torch.equal(found["w"], STATE["w"] * factor)) and found["n"] == STATE["n"]  # type: ignore[operator]


def times(factor: float) -> dict[str, Any]:
    return {**STATE, "w": STATE["w"] * factor}  # type: ignore[operator]


@pytest.mark.parametrize("kind", [CountingWriter, WrappingWriter])
def test_a_subclass_or_wrapper_reads_the_results_after_they_were_used(tmp_path: Path, kind: Any) -> None:
    writer = kind(str(tmp_path))
    save(STATE, storage_writer=writer, no_dist=True)
    assert writer.written_bytes > 1000 * 4
    assert FileSystemReader(tmp_path).read_metadata().state_dict_metadata


@pytest.mark.skipif(sys.version_info < (3, 11), reason="a caller holds the arguments of a call")
def test_a_writer_that_nothing_wraps_frees_the_results_for_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[Any] = []

    def index_of(metadata: Any, results: Any) -> Any:
        used.extend(weakref.ref(written_of(one)) for one in results)
        return written_index(metadata, results)

    def encoded(*arguments: Any, **options: Any) -> Any:
        assert [one() for one in used] == [None]
        return encode(*arguments, **options)

    monkeypatch.setattr(storage_writer, "written_index", index_of)
    monkeypatch.setattr(storage_writer, "encode", encoded)
    save(STATE, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    assert len(used) == 1


@pytest.mark.parametrize("kind", FILE_SYSTEMS)
@pytest.mark.parametrize("writer_type", [StockWriter, PrefixWriter])
@pytest.mark.parametrize(
    "options", [{}, {"thread_count": 3, "single_file_per_rank": False}, {"layout": "raw"}], ids=str
)
@pytest.mark.parametrize("reader_type", [StockReader, SortingReader])
def test_every_byte_goes_through_the_file_system_that_is_set(
    kind: str, writer_type: Any, options: dict[str, Any], reader_type: Any, tmp_path: Path
) -> None:
    place = str(tmp_path / "made") if kind == "local" else "bucket://made/"
    writer = writer_type(place, FILE_SYSTEMS[kind](), **options)
    for factor in (1.0, 2.0, 3.0):
        save(times(factor), storage_writer=writer)
        found = template()
        load(found, storage_reader=reader_type(place, FILE_SYSTEMS[kind]()))
        assert same(found, factor)
    opened = {path for path, mode in CALLS if mode == "wb"}
    left = {str(path) for path in tmp_path.rglob("*") if path.is_file()} if kind == "local" else set(BUCKET)
    assert left <= {*opened, f"{writer.path}/.metadata"}  # which got its name by a rename
    data = {name for name in left if name.endswith(".distcp")}
    assert len(data) == (4 if "thread_count" in options else 1)
    assert len(left) == len(data) + 1  # no marker, no temporary file, nothing of the saves before
    assert all(writer.save_id in name for name in data)
    assert all(("part0/__0_" in name) == (writer_type is PrefixWriter) for name in data)


def changed_fs(storage: Any) -> None:
    storage.fs = NotingFileSystem()


def changed_method(storage: Any) -> None:
    theirs = storage.fs.create_stream
    storage.fs.create_stream = lambda path, mode: (CALLS.append((str(path), mode)), theirs(path, mode))[1]


@pytest.mark.parametrize("change", [changed_fs, changed_method])
@pytest.mark.parametrize("when", ["at once", "after a save"])
def test_a_file_system_that_is_changed_later_counts(change: Callable[[Any], None], when: str, tmp_path: Path) -> None:
    writer, reader = FileSystemWriter(tmp_path), FileSystemReader(tmp_path)
    if when == "after a save":
        save(times(5.0), storage_writer=writer)
        load(template(), storage_reader=reader)
    assert not CALLS
    change(writer)
    save(STATE, storage_writer=writer)
    assert "wb" in {mode for _, mode in CALLS}
    CALLS.clear()
    change(reader)
    found = template()
    load(found, storage_reader=reader)
    assert same(found)
    assert {mode for _, mode in CALLS} == {"rb"}


def test_looking_at_the_file_system_changes_nothing(tmp_path: Path) -> None:
    writer = FileSystemWriter(tmp_path)
    assert isinstance(writer.fs, FileSystem)
    assert writer.fs.exists(writer.path)
    assert writer.foreign_fs is None


def test_a_path_that_is_set_counts(tmp_path: Path) -> None:
    writer, reader = FileSystemWriter(tmp_path / "a"), FileSystemReader(tmp_path / "a")
    writer.path = reader.path = tmp_path / "b"
    assert writer.checkpoint_id == reader.checkpoint_id == tmp_path / "b"
    save(STATE, storage_writer=writer)
    found = template()
    load(found, storage_reader=reader)
    assert same(found)
    assert not (tmp_path / "a").exists()
    writer.reset(str(tmp_path / "c"))
    assert writer.path == tmp_path / "c"


def test_attributes_that_are_set_later_count(tmp_path: Path) -> None:
    writer = FileSystemWriter(tmp_path)
    writer.single_file_per_rank = False
    save(STATE, storage_writer=writer)
    assert len([*tmp_path.glob("*.distcp")]) == 4
    writer.overwrite = False
    with pytest.raises(FileExistsError):
        save(STATE, storage_writer=writer)
    writer.serialization_format = SerializationFormat.SAFETENSORS
    with pytest.raises(ValueError, match="serialization_format"):
        save(STATE, storage_writer=writer)


def test_save_ids(tmp_path: Path) -> None:
    writer = FileSystemWriter(tmp_path)
    first = writer.save_id
    assert writer.storage_meta().save_id == first  # type: ignore[union-attr]
    for number in range(3):
        assert writer.save_id == first or number
        metadata = save(STATE, storage_writer=writer)
        assert metadata.storage_meta is not None
        assert metadata.storage_meta.save_id == writer.save_id
        assert (writer.save_id == first) == (number == 0)  # each save has one of its own
    last = writer.save_id
    writer.reset(tmp_path / "other")
    assert writer.save_id != last
    for other in (copy.copy(writer), pickle.loads(pickle.dumps(writer))):
        assert other.save_id != writer.save_id


def test_loaded_metadata_names_the_place_it_was_read_from(tmp_path: Path) -> None:
    """The index stores no path, so a checkpoint that was moved names its new place."""
    save(STATE, checkpoint_id=tmp_path / "first")
    (tmp_path / "first").rename(tmp_path / "moved")
    reader = FileSystemReader(tmp_path / "moved")
    assert reader.read_metadata().storage_meta.checkpoint_id == tmp_path / "moved"  # type: ignore[union-attr]
    save(STATE, checkpoint_id=tmp_path / "second")
    reader.reset(tmp_path / "second")
    assert reader.read_metadata().storage_meta.checkpoint_id == tmp_path / "second"  # type: ignore[union-attr]


def test_load_ids_and_places(tmp_path: Path) -> None:
    save(STATE, checkpoint_id=tmp_path)
    reader = FileSystemReader(tmp_path)
    first = reader.load_id
    assert reader.storage_data == {}
    metadata = reader.read_metadata()
    assert metadata.storage_meta is not None
    assert metadata.storage_meta.load_id == first
    assert metadata.storage_meta.checkpoint_id == tmp_path
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    assert {index.fqn for index in reader.storage_data} == {"w", "b", "n.step", "n.name"}
    reader.reset()
    assert reader.load_id != first
    assert reader.storage_data == {}


@pytest.mark.parametrize("kind", FILE_SYSTEMS)
@pytest.mark.parametrize("stop_at", range(1, 9))
def test_a_save_that_fails_leaves_the_old_checkpoint(kind: str, stop_at: int, tmp_path: Path) -> None:
    place = str(tmp_path / "made") if kind == "local" else "bucket://made"
    save(STATE, storage_writer=StockWriter(place, FILE_SYSTEMS[kind]()))
    writer, count = StockWriter(place, FILE_SYSTEMS[kind]()), 0
    theirs = writer.fs.create_stream

    def create_stream(path: Any, mode: str) -> Any:
        nonlocal count
        count += mode == "wb"
        if mode == "wb" and count == stop_at:
            raise OSError("the network is gone")
        return theirs(path, mode)

    writer.fs.create_stream = create_stream
    try:
        save(times(2.0), storage_writer=writer)
        factor = 2.0  # it does not write so often
    except OSError:
        factor = 1.0
    found = template()
    load(found, storage_reader=StockReader(place, FILE_SYSTEMS[kind]()))
    assert same(found, factor)
    if factor == 1.0:
        names = [path.name for path in (tmp_path / "made").iterdir()] if kind == "local" else [*BUCKET]
        assert len(names) == 2, names


def test_what_is_missing_or_short_is_said(tmp_path: Path) -> None:
    del tmp_path
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint in bucket://none"):
        load(template(), storage_reader=StockReader("bucket://none", BucketFileSystem()))
    save(STATE, storage_writer=StockWriter("bucket://made", BucketFileSystem()))
    (name,) = (name for name in BUCKET if name.endswith(".distcp"))
    whole = BUCKET[name]
    BUCKET[name] = whole[: len(whole) // 2]
    with pytest.raises(DcpError, match=r"truncated|ends before"):
        load(template(), storage_reader=StockReader("bucket://made", BucketFileSystem()))
    BUCKET[name] = whole[:2000] + bytes([whole[2000] ^ 1]) + whole[2001:]
    with pytest.raises(DcpError, match=r"CRC|differ"):
        load(template(), storage_reader=StockReader("bucket://made", BucketFileSystem()))
    del BUCKET[name]
    with pytest.raises(CheckpointNotFoundError, match="missing"):
        load(template(), storage_reader=StockReader("bucket://made", BucketFileSystem()))
