"""Seams of stock's modules that frameworks use, called as they call them, on stock's modules and on ours."""

from __future__ import annotations

import copy
import dataclasses
import enum
import importlib
import io
import pickle
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from hypothesis import given, settings
from hypothesis import strategies as st

import dcp_all
from dcp_bridge import replace_stock

STOCK = stock.__name__
MODULES = ("metadata", "planner", "storage", "filesystem", "staging", "state_dict", "default_planner")
# Fields that records of ours have in addition.
MORE = {
    "Metadata": {"aliases"},
    "SavePlan": {"aliases", "digests", "splittable"},
    "StorageInfo": {"stored"},
}


def stock_module(name: str) -> ModuleType:
    return importlib.import_module(f"{STOCK}.{name}")


def our_module(name: str) -> ModuleType:
    return importlib.import_module(f"dcp_all.{name}")


def classes(is_kind: Callable[[type], bool]) -> list[tuple[str, str]]:
    """Module and name of each class of a kind that both have."""
    return [
        (module, name)
        for module in MODULES
        for name, value in vars(stock_module(module)).items()
        if isinstance(value, type)
        and is_kind(value)
        and value.__module__ == f"{STOCK}.{module}"
        and hasattr(our_module(module), name)
    ]


def records() -> list[tuple[str, str]]:
    return classes(dataclasses.is_dataclass)


def enums() -> list[tuple[str, str]]:
    return [(module, name) for module, name in classes(lambda kind: issubclass(kind, enum.Enum)) if name[0] != "_"]


def sample(modules: Any, field: dataclasses.Field[Any]) -> Any:
    """A value of a field, made of records of one side."""
    metadata, planner = modules("metadata"), modules("planner")
    size = torch.Size([2])
    chunk = metadata.ChunkStorageMetadata(torch.Size([0]), size)
    properties = metadata.TensorProperties(torch.float64, requires_grad=True)
    index = metadata.MetadataIndex("w", torch.Size([0]), 0)
    write_data = planner.TensorWriteData(chunk, properties, size)
    values = {
        "chunk": chunk,
        "chunks": [chunk],
        "dest_index": index,
        "index": index,
        "storage_index": index,
        "properties": properties,
        "tensor_data": write_data,
        "items": [planner.WriteItem(index, planner.WriteItemType.SHARD, tensor_data=write_data)],
        "state_dict_metadata": {"w": metadata.TensorStorageMetadata(properties, size, [chunk])},
        "dtype": torch.float16,
        "layout": torch.strided,
        "memory_format": torch.preserve_format,
        "fqn": "w",
        "offset": torch.Size([1]),
        "type": planner.WriteItemType.TENSOR,
        **dict.fromkeys(("offsets", "sizes", "size", "dest_offsets", "storage_offsets", "lengths"), size),
        **dict.fromkeys(("length", "nbytes", "size_in_bytes"), 7),
    }
    if field.name in values:
        return values[field.name]
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else "x"


def made(modules: Any, module: str, name: str) -> Any:
    kind, theirs = getattr(modules(module), name), getattr(stock_module(module), name)
    values = {field.name: sample(modules, field) for field in dataclasses.fields(theirs) if field.init}
    if name == "_StorageInfo":
        values["offset"] = 3
    return kind(**values)


def plain(value: Any) -> Any:
    """A record as nested dicts, so that records of both sides can be compared."""
    if isinstance(value, enum.Enum):
        return type(value).__name__, value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        more = MORE.get(type(value).__name__, set())
        return {key: plain(item) for key, item in vars(value).items() if key not in more}
    if isinstance(value, dict):
        return {plain_key(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def plain_key(key: Any) -> Any:
    return str(plain(key)) if dataclasses.is_dataclass(key) else key


def test_the_walk_finds_the_records() -> None:
    names = {name for _, name in records()}
    assert {"Metadata", "TensorProperties", "WriteItem", "SavePlan", "WriteResult", "_StorageInfo"} <= names
    assert {name for _, name in enums()} >= {"WriteItemType", "LoadItemType", "SerializationFormat"}


@pytest.mark.parametrize(("module", "name"), records())
def test_records_have_the_same_vars(module: str, name: str) -> None:
    ours = made(our_module, module, name)
    assert plain(ours) == plain(made(stock_module, module, name))
    assert vars(ours).keys() - vars(made(stock_module, module, name)).keys() <= MORE.get(type(ours).__name__, set())
    assert pickle.loads(pickle.dumps(made(our_module, "planner", "WriteItem"))) == made(
        our_module, "planner", "WriteItem"
    )


def test_properties_make_a_tensor() -> None:
    """As Megatron-Core does with those of a stored tensor."""
    properties = dcp_all.TensorStorageMetadata(
        our_module("metadata").TensorProperties.create_from_tensor(torch.ones(2, dtype=torch.float16)),
        torch.Size([2]),
        [],
    ).properties
    assert torch.empty(2, **vars(properties), device="meta").dtype is torch.float16
    assert properties.strides == (1,)
    assert copy.deepcopy(properties) == pickle.loads(pickle.dumps(properties)) == properties


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(("module", "name"), records())
def test_pickles_of_records_round_trip_in_a_replacement(module: str, name: str, protocol: int) -> None:
    before = made(stock_module, module, name)
    data = pickle.dumps(before, protocol)
    ours = type(made(our_module, module, name))
    with replace_stock():
        replaced = getattr(importlib.import_module(f"{STOCK}.{module}"), name)
        assert replaced is ours
        for found in (
            pickle.loads(data),
            pickle.loads(pickle.dumps(before, protocol)),
            pickle.loads(pickle.dumps(made(our_module, module, name), protocol)),
        ):
            assert type(found) is ours
            for field in dataclasses.fields(before):
                assert plain(getattr(found, field.name)) == plain(getattr(before, field.name))
    assert type(pickle.loads(pickle.dumps(before, protocol))) is type(before)


@pytest.mark.parametrize(("module", "name"), enums())
def test_members_of_enumerations_are_equal_to_those_of_stock(module: str, name: str) -> None:
    theirs, ours = getattr(stock_module(module), name), getattr(our_module(module), name)
    for left in theirs:
        for right in ours:
            assert (left == right) == (right == left) == (left.name == right.name)
            assert left.name != right.name or hash(left) == hash(right)
        data = pickle.dumps(left)
        with replace_stock():
            assert pickle.loads(data) is pickle.loads(pickle.dumps(left)) is ours[left.name]
    assert next(iter(ours)) != "TENSOR"


class Leaf:
    """A value of a framework, like Megatron-Core's sharded tensors."""


TREES = st.recursive(
    st.sampled_from([1, "x", Leaf(), torch.zeros(1), (1, 2), None]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=12,
)


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from("xyz"), TREES, max_size=3), st.sampled_from([Leaf, torch.Tensor, int, list, object])
)
def test_traversal_asks_for_each_element(state: dict[str, Any], leaf: type) -> None:
    paths: dict[str, list[Any]] = {}
    for side in (STOCK, "dcp_all"):
        found = paths.setdefault(side, [])
        traverse = importlib.import_module(f"{side}._traverse").traverse_state_dict
        traverse(
            state, lambda path, value, found=found: found.append((path, id(value))), lambda item: isinstance(item, leaf)
        )
    assert paths["dcp_all"] == paths[STOCK]


@pytest.mark.parametrize("side", [STOCK, "dcp_all"])
def test_a_planner_that_was_pickled_resolves_data(side: str) -> None:
    module = importlib.import_module(f"{side}.default_planner")
    state = {"a": torch.arange(4.0), "n": {"step": 3}}
    planner = module.DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    items = {item.index.fqn: item for item in planner.create_local_plan().items}
    for twin in (pickle.loads(pickle.dumps(planner)), copy.deepcopy(planner), copy.copy(planner)):
        assert torch.equal(twin.resolve_data(items["a"]), state["a"])
        data = twin.resolve_data(items["n.step"])
        assert torch.load(io.BytesIO(data.getvalue()), weights_only=True) == 3


@pytest.mark.parametrize("side", [STOCK, "dcp_all"])
@pytest.mark.parametrize("name", ["AsyncStager"])
def test_a_stager_must_say_how_it_stages(side: str, name: str) -> None:
    base = getattr(importlib.import_module(f"{side}.staging"), name)

    class Mine(base):  # type: ignore[misc, valid-type]
        pass

    assert Mine().should_synchronize_after_execute is True
    with pytest.raises(NotImplementedError, match="Mine must implement stage"):
        Mine().stage({})


@pytest.mark.filterwarnings("ignore")  # PyTorch's, that a checkpoint is replaced
@pytest.mark.parametrize("saves", [1, 2])
@pytest.mark.parametrize("side", [STOCK, "dcp_all"])
def test_a_writer_that_names_its_files_itself_finishes(side: str, saves: int, tmp_path: Path) -> None:
    """Megatron-Core's and NVRx's writers plan without the coordinator, and call `finish` of the base class."""
    package = importlib.import_module(side)
    module = importlib.import_module(f"{side}.filesystem")
    writer = module.FileSystemWriter(tmp_path)
    for number in range(saves):
        values = torch.arange(4.0) + number
        planner = package.DefaultSavePlanner()
        planner.set_up_planner({"a": values}, is_coordinator=True)
        writer.reset(tmp_path)
        writer.set_up_storage_writer(True)
        plan = writer.prepare_local_plan(planner.create_local_plan())
        (plan,), metadata = planner.create_global_plan([plan])
        plan = dataclasses.replace(plan, storage_data=stock.filesystem._StoragePrefix("__0_"))
        torch.save(values, tmp_path / "__0_0.distcp")
        info = module._StorageInfo("__0_0.distcp", 0, (tmp_path / "__0_0.distcp").stat().st_size)
        results = [[module.WriteResult(plan.items[0].index, 16, info)]]
        writer.finish(metadata, results)
        for reader in (stock, dcp_all):
            state = {"a": torch.zeros(4)}
            reader.load(state, checkpoint_id=tmp_path)
            assert torch.equal(state["a"], values)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".metadata", "__0_0.distcp"]


def test_helpers_of_stock_make_items_that_are_saved_and_loaded(tmp_path: Path) -> None:
    """Items of stock's own class, and of its private functions, also while stock is replaced."""
    import torch.distributed.checkpoint.planner_helpers as theirs

    def run(folder: Path) -> dict[str, Any]:
        from torch.distributed.checkpoint import (
            DefaultLoadPlanner,
            DefaultSavePlanner,
            FileSystemReader,
            FileSystemWriter,
            LoadPlan,
            SavePlan,
            load,
            save,
        )
        from torch.distributed.checkpoint.planner_helpers import _create_read_items, _create_write_items

        class Saves(DefaultSavePlanner):
            def create_local_plan(self) -> Any:
                made = [theirs._create_write_items, _create_write_items]
                items = [item for n, pair in enumerate(self.state_dict.items()) for item in made[n % 2](*pair)]
                self.plan = SavePlan(items, planner_data=self.mappings)
                return self.plan

        class Loads(DefaultLoadPlanner):
            def create_local_plan(self) -> Any:
                known = self.metadata.state_dict_metadata
                items = [
                    item
                    for fqn, value in self.state_dict.items()
                    for item in _create_read_items(fqn, known[fqn], value)
                ]
                return LoadPlan(items)

        state = {"a": torch.arange(4.0), "b": torch.ones(2, 2), "step": 1, "rng": io.BytesIO(b"seed")}
        save(state, storage_writer=FileSystemWriter(folder), planner=Saves(), no_dist=True)
        found = {"a": torch.zeros(4), "b": torch.zeros(2, 2), "step": 0, "rng": io.BytesIO()}
        load(found, storage_reader=FileSystemReader(folder), planner=Loads(), no_dist=True)
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = run(tmp_path / "stock")
        with replace_stock():
            found = run(tmp_path / "ours")
    assert found["step"] == expected["step"] == 1
    assert found["rng"].getvalue() == expected["rng"].getvalue() == b"seed"
    assert all(torch.equal(found[name], expected[name]) for name in "ab")


def test_stock_s_writing_of_an_item_takes_our_records() -> None:
    """Frameworks write by `_write_item`, which has no counterpart: with members of ours it wrote nothing."""
    from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms, _write_item

    planner = our_module("planner")
    index = our_module("metadata").MetadataIndex("x")
    kinds = {planner.WriteItemType.BYTE_IO: io.BytesIO(b"1234"), planner.WriteItemType.TENSOR: torch.ones(2)}
    for kind, data in kinds.items():
        with tempfile.TemporaryFile() as file:
            item = planner.WriteItem(index, kind)
            given = our_module("filesystem").SerializationFormat.TORCH_SAVE
            result = _write_item(_StorageWriterTransforms(), file, data, item, "f", serialization_format=given)
            assert file.tell() == result.storage_data.length > 0
