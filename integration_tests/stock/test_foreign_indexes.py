"""Indexes as other programs may write them: each loads, verifies and converts, or one error names file, cause, remedy.

The classes of the other program are not installed when its index is read, and nothing in the pickle is called.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime as dt
import decimal
import enum
import functools
import os
import pickle
import shutil
import sys
import types
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import Shard

import dcp_all
from dcp_base import DcpError
from dcp_io import LocalStore, verify_checkpoint
from dcp_manifest import CorruptCheckpointError, UnsafeCheckpointError

WEIGHT = torch.arange(8.0).reshape(2, 4)
THEIRS = "megatron_like"
_CALLED = []


class Unknown:
    """A class of the other program, with any attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    a: int = 1


class Number(enum.Enum):
    A = 1


class Whole(enum.IntEnum):
    A = 0


class Text(str):
    __slots__ = ()


class Mapping(dict):  # type: ignore[type-arg]
    pass


class Size(tuple):  # type: ignore[type-arg]
    __slots__ = ()


class Steps:
    """Uses every part of the protocol of `__reduce__`."""

    def __reduce__(self) -> Any:
        return Unknown, (), {"a": 1}, iter([1, 2]), iter([("a", 1)])


def called(*arguments: Any) -> None:
    _CALLED.append(arguments)


class Hostile:
    def __reduce__(self) -> Any:
        return called, ("its index",)


class HostileState(Unknown):
    def __setstate__(self, state: Any) -> None:
        called(state)


SUBCLASSES: dict[type, type] = {
    base: type(f"Sub{base.__name__}", (base,), {"__module__": THEIRS})
    for base in (
        *(Metadata, TensorStorageMetadata, BytesStorageMetadata, ChunkStorageMetadata, TensorProperties),
        *(MetadataIndex, _StorageInfo),
    )
}
OTHERS = (Unknown, Slotted, Number, Whole, Text, Mapping, Size, Steps, Hostile, HostileState, called)


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """The other program's package can be imported."""
    module = types.ModuleType(THEIRS)
    named = {each: each.__module__ for each in OTHERS}
    for each in (*OTHERS, *SUBCLASSES.values()):
        each.__module__ = THEIRS
        setattr(module, each.__name__, each)
    sys.modules[THEIRS] = module
    try:
        yield
    finally:
        del sys.modules[THEIRS]
        for each, name in named.items():
            each.__module__ = name


def records(found: Metadata, kind: type) -> list[Any]:
    """All records of a class in an index."""
    entries = [*found.state_dict_metadata.values()]
    tensors = [entry for entry in entries if isinstance(entry, TensorStorageMetadata)]
    chunks = [chunk for tensor in tensors for chunk in tensor.chunks]
    places = [*found.storage_data, *found.storage_data.values()]
    every = [found, *entries, *chunks, *places, *(tensor.properties for tensor in tensors), found.storage_meta]
    return [each for each in every if isinstance(each, kind)]


def attribute(kind: type, value: Callable[[], Any]) -> Callable[[Metadata], None]:
    def change(found: Metadata) -> None:
        for each in records(found, kind):
            object.__setattr__(each, "extra", value())

    return change


def fields(kind: type, **values: Callable[[Any], Any]) -> Callable[[Metadata], None]:
    """Replace fields of all records of a class by what a function makes of the old value."""

    def change(found: Metadata) -> None:
        for each in records(found, kind):
            for name, make in values.items():
                object.__setattr__(each, name, make(getattr(each, name)))

    return change


def subclass(kind: type) -> Callable[[Metadata], Any]:
    def of(value: Any) -> Any:
        if type(value) is not kind:
            return value
        made = object.__new__(SUBCLASSES[kind])
        vars(made).update(vars(value))
        return made

    def change(found: Metadata) -> Any:
        found.state_dict_metadata = {name: of(entry) for name, entry in found.state_dict_metadata.items()}
        for tensor in records(found, TensorStorageMetadata):
            tensor.chunks, tensor.properties = [of(chunk) for chunk in tensor.chunks], of(tensor.properties)
        found.storage_data = {of(index): of(info) for index, info in found.storage_data.items()}
        return of(found)

    return change


def lacking(kind: type, *names: str) -> Callable[[Metadata], None]:
    def change(found: Metadata) -> None:
        for each in records(found, kind):
            for name in names:
                vars(each).pop(name, None)

    return change


def planner_data(value: Any) -> Callable[[Metadata], None]:
    return lambda found: setattr(found, "planner_data", value)


def infos(make: Callable[[_StorageInfo], Any]) -> Callable[[Metadata], None]:
    return lambda found: setattr(found, "storage_data", {k: make(info) for k, info in found.storage_data.items()})


def more(name: Any, entry: Any) -> Callable[[Metadata], None]:
    return lambda found: found.state_dict_metadata.update({name: entry})


def sharded_objects(found: Metadata) -> None:
    """As Megatron-Core names objects that ranks save."""
    info = found.storage_data[MetadataIndex("n.step")]
    for name in ("rng_state/shard_0_1", "optimizer.param_groups/shard_0.0.0_1.1.1"):
        found.state_dict_metadata[name], found.storage_data[MetadataIndex(name)] = BytesStorageMetadata(), info


VALUES: dict[str, Callable[[], Any]] = {
    "an unknown class": lambda: Unknown(a=Unknown()),
    "slots": Slotted,
    "an enumeration": lambda: Number.A,
    "all of __reduce__": Steps,
    "numpy": lambda: (np.arange(3), np.float32(1), np.dtype("f4")),
    "a tensor": lambda: torch.ones(3),
    "a placement": lambda: [Shard(0), torch.float16, torch.device("cpu")],
    "hostile": Hostile,
    "a hostile state": lambda: HostileState(a=1),
    "the standard library": lambda: (
        *(dt.date(2020, 1, 1), decimal.Decimal(1), uuid.uuid4(), Path("a"), {1}, frozenset((1,)), 1j),
        *(range(3), ..., slice(1), dict, len, functools.partial(len), ValueError("x"), types.SimpleNamespace(a=1)),
        *(collections.deque((1,)), collections.Counter("a"), bytearray(b"x"), 1 << 900),
    ),
    "plans": lambda: [stock.SavePlan([])],
    "another index": lambda: Metadata({}),
}
LOADS: dict[str, Callable[[Metadata], Any]] = {
    **{f"{name}, of Metadata": attribute(Metadata, value) for name, value in VALUES.items()},
    **{
        f"an attribute of {kind.__name__}": attribute(kind, VALUES["an unknown class"])
        for kind in (*(each for each in SUBCLASSES if each is not TensorProperties), StorageMeta)
    },
    "planner_data of lists": planner_data({"w": ["w"], "n.step": ["n", "step"]}),
    "planner_data of texts": planner_data({"w": "w", "n.step": "n.step"}),
    "planner_data with other keys": planner_data({1: ("w",), None: (), ("a",): ("b",)}),
    "planner_data with other elements": planner_data({"w": (("w",),), "n.step": ("n", 1.5)}),
    "planner_data of an unknown class": lambda found: setattr(found, "planner_data", Unknown(a=1)),
    "planner_data that is a list": planner_data([1]),
    "no planner_data": lacking(Metadata, "planner_data"),
    "no version and no storage_meta": lacking(Metadata, "version", "storage_meta"),
    "another version": lambda found: setattr(found, "version", (9, Unknown())),
    "storage_meta of an unknown class": lambda found: setattr(found, "storage_meta", Unknown()),
    "no transforms, as older versions": lacking(_StorageInfo, "transform_descriptors"),
    "no index in the places": lacking(MetadataIndex, "index"),
    "sizes that are lists": fields(ChunkStorageMetadata, offsets=list, sizes=list),
    "objects of shards": sharded_objects,
    "a place of nothing": lambda found: found.storage_data.update({MetadataIndex("z"): _StorageInfo("z", 0, 1)}),
}
REFUSED: dict[str, tuple[Callable[[Metadata], Any], str]] = {
    **{
        f"subclass of {kind.__name__}": (subclass(kind), f"asks for {THEIRS}.Sub{kind.__name__}") for kind in SUBCLASSES
    },
    "a subclass of dict": (
        lambda found: setattr(found, "state_dict_metadata", Mapping(found.state_dict_metadata)),
        f"asks for {THEIRS}.Mapping",
    ),
    "sizes of a subclass": (fields(TensorStorageMetadata, size=Size), f"asks for {THEIRS}.Size"),
    "sizes of numpy": (fields(_StorageInfo, offset=np.int64), "asks for numpy"),
    "a float": (fields(_StorageInfo, length=float), "a float is in the place of a number of bytes"),
    "a bool": (fields(_StorageInfo, offset=bool), "a bool is in the place of a number of bytes"),
    "an enumeration": (fields(_StorageInfo, offset=lambda _: Whole.A), f"asks for {THEIRS}.Whole"),
    "infos of an unknown class": (infos(lambda info: Unknown(**vars(info))), f"asks for {THEIRS}.Unknown"),
    "infos that are dicts": (infos(vars), "a dict is in the place of a _StorageInfo"),
    "infos that are None": (infos(lambda _: None), "a NoneType is in the place of a _StorageInfo"),
    "keys of places that are texts": (
        lambda found: setattr(found, "storage_data", {k.fqn: v for k, v in found.storage_data.items()}),
        "a str is in the place of a MetadataIndex",
    ),
    "places that are a list": (lambda found: setattr(found, "storage_data", [1]), "a list is in the place of a dict"),
    "no places": (lambda found: setattr(found, "storage_data", {}), "has no location of"),
    "a path above": (fields(_StorageInfo, relative_path=lambda _: "../x"), "not a plain path inside"),
    "an absolute path": (fields(_StorageInfo, relative_path=lambda _: "/etc/passwd"), "not a plain path inside"),
    "a name that is a number": (more(3, BytesStorageMetadata()), "int is in the place of the name of a tensor"),
    "a name that is a tuple": (more(("a", 0), BytesStorageMetadata()), "a tuple is in the place of the name"),
    "an entry of an unknown class": (more("x", Unknown()), f"asks for {THEIRS}.Unknown"),
    "an entry that is None": (more("x", None), "a NoneType is in the place of the entry"),
    "an entry that is a dict": (more("x", {}), "a dict is in the place of the entry"),
    "a hostile entry": (more("x", Hostile()), f"asks for {THEIRS}.called"),
    "no chunks": (lacking(TensorStorageMetadata, "chunks"), "it has no 'chunks'"),
    "a dtype that is a text": (fields(TensorProperties, dtype=lambda _: "float32"), "a str is in the place of a dtype"),
    "no properties": (fields(TensorStorageMetadata, properties=lambda _: None), "in the place of a TensorProperties"),
    "a smaller tensor": (fields(TensorStorageMetadata, size=lambda _: torch.Size([1, 4])), "reaches beyond the tensor"),
    "a dict": (vars, "a dict is in the place of a Metadata"),
    "a tuple": (lambda found: (found, 1), "a tuple is in the place of a Metadata"),
    "an unknown class": (lambda found: Unknown(**vars(found)), f"asks for {THEIRS}.Unknown"),
    "a call": (lambda found: Hostile(), f"asks for {THEIRS}.called"),
    "a tensor": (lambda found: torch.ones(2), "torch._utils"),
}


def outside(found: Metadata) -> bytes:
    found.extra = pickle.PickleBuffer(bytearray(b"x" * 100))  # type: ignore[attr-defined]
    return pickle.dumps(found, 5, buffer_callback=lambda _: None)


# What the file holds instead of one pickle.
FILES: dict[str, tuple[Callable[[Metadata], bytes], str]] = {
    "buffers elsewhere": (outside, "uses the opcode NEXT_BUFFER"),
    "protocol 0": (lambda found: pickle.dumps(found, 0), "asks for copyreg"),
    "bytes after it": (lambda found: pickle.dumps(found) + b"more", "not a valid manifest"),
    "two pickles": (lambda found: pickle.dumps(found) + pickle.dumps(1), "not a valid manifest"),
    "a part of it": (lambda found: pickle.dumps(found)[:-20], "truncated"),
    "nothing": (lambda _: b"", "index"),
    "a text": (lambda _: b"hello\n", "index"),
    "JSON": (lambda _: b'{"a": 1}', "index"),
    "zeros": (lambda _: bytes(900), "index"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "c"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock.save({"w": WEIGHT, "n": {"step": 3}}, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.fixture
def index(saved: Path, tmp_path: Path) -> Callable[[Callable[[Metadata], Any]], Path]:
    """Write an index: bytes, or what a change returns or leaves."""

    def index(change: Callable[[Metadata], Any]) -> Path:
        folder = tmp_path / "c"
        shutil.copytree(saved, folder)
        found = pickle.loads((saved / ".metadata").read_bytes())
        with installed():
            changed = change(found)
            changed = found if changed is None else changed
            data = changed if isinstance(changed, bytes) else pickle.dumps(changed, 4)
        (folder / ".metadata").write_bytes(data)
        _CALLED.clear()
        return folder

    return index


@pytest.mark.parametrize("kind", LOADS)
def test_it_loads_verifies_and_converts(index: Any, tmp_path: Path, kind: str) -> None:
    folder = index(LOADS[kind])
    state: dict[str, Any] = {"w": torch.zeros(2, 4), "n": {"step": 0}}
    dcp_all.load(state, checkpoint_id=folder, no_dist=True)
    assert torch.equal(state["w"], WEIGHT)
    assert state["n"] == {"step": 3}
    assert torch.equal(dcp_all.load_keys(checkpoint_id=folder, no_dist=True)["w"], WEIGHT)
    assert verify_checkpoint(LocalStore(folder)).problems == ()
    for name in ("model.safetensors", "model.pt"):
        dcp_all.convert(folder, tmp_path / name, include=["w"])
    assert dcp_all.latest_valid(tmp_path) is not None
    assert _CALLED == []


@pytest.mark.parametrize("kind", [*REFUSED, *FILES])
def test_one_error_names_file_cause_and_remedy(index: Any, tmp_path: Path, kind: str) -> None:
    change, cause = REFUSED[kind] if kind in REFUSED else FILES[kind]
    folder = index(change)
    calls: list[Callable[[], Any]] = [
        lambda: dcp_all.load({"w": torch.zeros(2, 4)}, checkpoint_id=folder, no_dist=True),
        lambda: dcp_all.load_keys(checkpoint_id=folder, no_dist=True),
        lambda: dcp_all.convert(folder, tmp_path / "model.pt"),
    ]
    for call in calls:
        with pytest.raises((CorruptCheckpointError, UnsafeCheckpointError)) as caught:
            call()
        text = str(caught.value)
        assert cause in text, text
        assert ".metadata" in text
        assert str(folder) in text
        assert any(remedy in text for remedy in ("restore", "load the checkpoint with", "save it again")), text
    assert verify_checkpoint(LocalStore(folder)).problems
    assert dcp_all.latest_valid(tmp_path) is None
    assert _CALLED == []


@pytest.mark.parametrize(
    ("paths", "cause"),
    [
        ({"w": ("n",), "n.step": ("n", "step")}, "needs a mapping for its element 'step'"),
        ({"w": ("w",), "n.step": ("n", 10**30)}, "is not in 0 to 16,777,216"),
        ({"w": ("w",), "n.step": ("n", -1)}, "is not in 0 to 16,777,216"),
        ({"w": (), "n.step": ("n", "step")}, "has an empty path"),
    ],
)
def test_paths_without_a_structure_are_refused_by_loads_without_a_template(index: Any, paths: Any, cause: str) -> None:
    folder = index(planner_data(paths))
    with pytest.raises(DcpError, match=f"{cause}.*load the checkpoint into a template"):
        dcp_all.load_keys(checkpoint_id=folder, no_dist=True)
    state: dict[str, Any] = {"w": torch.zeros(2, 4), "n": {"step": 0}}
    dcp_all.load(state, checkpoint_id=folder, no_dist=True)
    assert torch.equal(state["w"], WEIGHT)


# Program → directory of its checkpoint, and files beside the data.
FOLDERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "torchtitan": ("outputs/checkpoint/step-100", ()),
    "TorchTune": ("epoch_0", ("recipe_state/recipe_state.pt",)),
    "Lightning": ("checkpoints/epoch=0-step=100.ckpt", ("meta.pt",)),
    "Accelerate": ("checkpoint-100/pytorch_model_fsdp_0", ("../optimizer_0/x", "../scheduler.bin")),
    "NeMo": ("model--val_loss=1.0-step=100/weights", ("common.pt", "metadata.json", "../context/io.json")),
}


@pytest.mark.parametrize("program", FOLDERS)
def test_folders_of_programs(saved: Path, tmp_path: Path, program: str) -> None:
    name, around = FOLDERS[program]
    folder = tmp_path / name
    shutil.copytree(saved, folder)
    for path in around:
        other = Path(os.path.normpath(folder / path))
        other.parent.mkdir(parents=True, exist_ok=True)
        other.write_text("theirs")
    state = {"w": torch.zeros(2, 4)}
    dcp_all.load(state, checkpoint_id=folder, no_dist=True)
    assert torch.equal(state["w"], WEIGHT)
    assert verify_checkpoint(LocalStore(folder)).problems == ()
    dcp_all.convert(folder, tmp_path / "w.safetensors", include=["w"])
    found = dcp_all.latest_valid(tmp_path)
    assert found is not None
    assert Path(found.store.url) == folder
