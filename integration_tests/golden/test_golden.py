from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
import torch

from dcp_io import LocalStore, verify_checkpoint
from dcp_manifest import index_of, read_index
from dcp_manifest.file.blob import FOOTER_BYTES, read_footer
from dcp_manifest.file.index_problems import examine
from dcp_manifest.index.columns import Framing
from integration_tests.golden import make, make_stock
from integration_tests.golden.reference_reader import Manifest, read_checkpoint, read_stored

HERE = Path(__file__).parent
OURS = sorted(HERE.glob("format-*/*/expected*.json"))
FOLDERS = sorted({path.parent for path in OURS})
STOCK = sorted(HERE.glob("stock/*"))


def name(path):
    return str(path.relative_to(HERE))


def index_file(expected):
    return expected.with_name(expected.name.removeprefix("expected").removesuffix(".json"))


def plain(value):
    """As JSON has it."""
    return json.loads(json.dumps(value))


def shown(data):
    return data.hex() if len(data) <= 64 else f"{len(data)} bytes"


def test_there_is_something_to_read():
    assert len(FOLDERS) == 10
    assert len(STOCK) >= 3


def test_the_current_writer_still_writes_these_bytes(tmp_path):
    make.make_all(tmp_path / make.VERSION)
    make.make_even(tmp_path / make.VERSION_WITH_RUNS / "even")
    make.make_levels(tmp_path / make.VERSION_WITH_LEVELS / "levels")
    files = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    golden = [HERE / version for version in (make.VERSION, make.VERSION_WITH_RUNS, make.VERSION_WITH_LEVELS)]
    assert files == {path.relative_to(HERE) for folder in golden for path in folder.rglob("*") if path.is_file()}
    assert [str(path) for path in files if (HERE / path).read_bytes() != (tmp_path / path).read_bytes()] == []


def test_even_columns_are_runs():
    path = HERE / make.VERSION_WITH_RUNS / "even" / ".metadata"
    footer = read_footer(path.read_bytes()[-FOOTER_BYTES:], size=path.stat().st_size, file=str(path))
    assert (footer.major, footer.minor) == (2, 0)
    even = {"chunk.file", "chunk.offset.0", "chunk.offset.1", "chunk.size.1"}
    assert even <= set(Manifest(path.read_bytes()).rows)


def test_crcs_are_in_the_order_of_levels():
    path = HERE / make.VERSION_WITH_LEVELS / "levels" / ".metadata"
    footer = read_footer(path.read_bytes()[-FOOTER_BYTES:], size=path.stat().st_size, file=str(path))
    assert (footer.major, footer.minor) == (3, 0)
    manifest = Manifest(path.read_bytes())
    assert manifest.column("level.running", manifest.rows["level"]) == [1] + [0] * 69


@pytest.mark.parametrize("expected", OURS, ids=name)
def test_a_reader_made_from_the_page_alone_finds_everything(expected):
    wanted = json.loads(expected.read_text())
    found = read_checkpoint(index_file(expected))
    folder = expected.parent
    tensors = [
        {
            "name": tensor.name,
            "owner": tensor.owner,
            "dtype": tensor.dtype,
            "flags": tensor.flags,
            "shape": tensor.shape,
            "boxes": [(offsets, sizes) for offsets, sizes, _ in tensor.chunks],
            "data": [shown(read_stored(folder, item)) for *_, item in tensor.chunks],
        }
        for tensor in found.tensors
    ]
    assert plain(tensors) == wanted["tensors"]
    objects = [
        {"name": key, "owner": owner, "value": torch.load(io.BytesIO(read_stored(folder, item)), weights_only=True)}
        for key, owner, item in found.objects
    ]
    assert objects == wanted["objects"]
    assert found.aliases == wanted["aliases"]
    assert plain(found.paths) == {key: [plain_part(part) for part in path] for key, path in wanted["paths"].items()}


def plain_part(part):
    """Integer keys are strings in our own records."""
    return int(part) if isinstance(part, str) and part.isdecimal() else part


@pytest.mark.parametrize("expected", OURS, ids=name)
def test_our_reader_finds_the_same(expected):
    wanted = json.loads(expected.read_text())
    path = index_file(expected)
    index = read_index(path.read_bytes(), file=str(path))
    reference = read_checkpoint(path)
    assert index.tensor_names == [row["name"] for row in wanted["tensors"]]
    assert [index.dtypes[row] for row in index.tensor_dtype] == [row["dtype"] for row in wanted["tensors"]]
    assert index.tensor_shape.tolist() == [size for row in wanted["tensors"] for size in row["shape"]]
    assert plain(index.paths) == wanted["paths"]
    assert index.info.save_id == reference.info["save_id"] == make.SAVE_ID
    items = [item for tensor in reference.tensors for *_, item in tensor.chunks]
    for row, item in enumerate(items):
        own = index.stored_item(index.chunk_items, row)
        assert (own.file, own.offset + own.lead, own.stored_bytes) == (item.file, item.start, item.stop - item.start)
        assert (own.crc32, own.running_crcs.tolist(), own.framing) == (item.crc32, item.running, item.framing)
    assert examine(path.read_bytes(), file=str(path)).problems == ()


@pytest.mark.parametrize("folder", FOLDERS, ids=name)
def test_nothing_is_wrong_with_the_whole_checkpoint(folder):
    problems = list(verify_checkpoint(LocalStore(folder)).problems)
    # Of the values of single ranks only those of some ranks were saved on purpose.
    assert problems == []


def test_items_of_the_torch_layout_are_archives():
    folder = HERE / "format-1.0" / "torch"
    index = index_of(folder)
    starts = index.chunk_starts()
    for row, tensor in enumerate(index.tensor_names):
        for chunk in range(starts[row], starts[row + 1]):
            item = index.stored_item(index.chunk_items, chunk)
            data = (folder / item.file).read_bytes()[item.offset : item.offset + item.length]
            value = torch.load(io.BytesIO(data), weights_only=True)
            assert value.dtype == getattr(torch, index.dtypes[index.tensor_dtype[row]]), tensor
            assert item.framing is Framing.RAW
            assert (item.offset + item.lead) % 64 == 0
            payload = data[item.lead : item.lead + item.stored_bytes]
            assert bytes(value.contiguous().reshape(-1).view(torch.uint8).tolist()) == payload


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_stock_loads_the_torch_layout():
    from torch.distributed.checkpoint import FileSystemReader, load

    wanted = json.loads((HERE / "format-1.0" / "torch" / "expected.metadata.json").read_text())
    state = {"model": {}, "list": [], "epoch": 0, "note": None}
    tensors = {row["name"]: torch.zeros(row["shape"], dtype=getattr(torch, row["dtype"])) for row in wanted["tensors"]}
    flat = {**tensors, "model.tied": torch.zeros(4, 3)}
    for key, value in flat.items():
        first, *rest = wanted["paths"][key]
        if not rest:
            state[first] = value
        elif isinstance(rest[0], int):
            state[first].append(value)
        else:
            state[first][rest[0]] = value
    load(state, storage_reader=FileSystemReader(HERE / "format-1.0" / "torch"), no_dist=True)
    for row in wanted["tensors"]:
        data = bytes(tensors[row["name"]].reshape(-1).view(torch.uint8).tolist()) if math.prod(row["shape"]) else b""
        assert shown(data) == ("".join(row["data"]) if len(data) <= 64 else row["data"][0])
    assert torch.equal(flat["model.tied"], flat["model.weight"])
    assert (state["epoch"], state["note"]) == (7, {"lr": 0.5, "tags": ["a", "ß"]})


@pytest.mark.parametrize("folder", [HERE / "format-1.0" / "raw", HERE / "format-1.0" / "own"], ids=name)
def test_stock_is_told_why_it_cannot_load_the_others(folder):
    from torch.distributed.checkpoint import FileSystemReader

    with pytest.raises(RuntimeError, match=r"torch\.distributed\.checkpoint cannot load it, because"):
        FileSystemReader(folder).read_metadata()


def value_of(folder, index, wanted):
    """A tensor or an object of a checkpoint that stock wrote, put together from its archives."""
    if wanted in index.object_names:
        item = index.stored_item(index.object_items, index.object_names.index(wanted))
        return load_item(folder, item)
    row = index.tensor_names.index(wanted)
    shape = index.tensor_shape[index.shape_starts()[row] : index.shape_starts()[row + 1]].tolist()
    value = torch.zeros(shape, dtype=getattr(torch, index.dtypes[index.tensor_dtype[row]]))
    at = index.box_starts()[row]
    for chunk in range(index.chunk_starts()[row], index.chunk_starts()[row + 1]):
        box = tuple(
            slice(offset, offset + size)
            for offset, size in zip(
                index.chunk_offsets[at : at + len(shape)].tolist(),
                index.chunk_sizes[at : at + len(shape)].tolist(),
                strict=True,
            )
        )
        at += len(shape)
        value[box] = load_item(folder, index.stored_item(index.chunk_items, chunk))
    return value


def load_item(folder, item):
    data = (folder / item.file).read_bytes()[item.offset : item.offset + item.length]
    return torch.load(io.BytesIO(data), weights_only=True)


def flattened():
    values = make_stock.plain_values()
    return {
        "model.bias": (values["model"]["bias"], ("model", "bias")),
        "model.scale": (values["model"]["scale"], ("model", "scale")),
        "model.weight": (make_stock.weight(), ("model", "weight")),
        "mask": (values["mask"], ("mask",)),
        "empty": (values["empty"], ("empty",)),
        "list.0": (values["list"][0], ("list", 0)),
        "list.1.deep": (values["list"][1]["deep"], ("list", 1, "deep")),
        "grad": (values["grad"].detach(), ("grad",)),
        "epoch": (values["epoch"], ("epoch",)),
    }


@pytest.mark.parametrize("folder", STOCK, ids=name)
def test_what_other_versions_of_torch_wrote_is_read(folder):
    data = (folder / ".metadata").read_bytes()
    index = read_index(data, file=".metadata")
    for key, (wanted, path) in flattened().items():
        found = value_of(folder, index, key)
        if isinstance(wanted, torch.Tensor):
            assert found.dtype == wanted.dtype
            assert torch.equal(found, wanted), key
        else:
            assert found == wanted
        assert index.paths[key] == path
    assert value_of(folder, index, "note.lr" if "note.lr" in index.object_names else "note") in (
        0.5,
        make_stock.plain_values()["note"],
    )
    assert index.tensor_chunks[index.tensor_names.index("model.weight")] == 2
    assert index.tensor_flags[index.tensor_names.index("grad")] == 1
    assert index.info is None
    assert examine(data, file=".metadata").problems == ()
