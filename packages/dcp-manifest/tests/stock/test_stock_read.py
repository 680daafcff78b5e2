from __future__ import annotations

import collections
import contextlib
import os
import pickle
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcp_manifest import CorruptCheckpointError, UnsafeCheckpointError, UnsupportedFormatError, read_index
from dcp_manifest.index.columns import Framing, TensorFlags
from dcp_manifest.stock.stock_read import read_stock

OLD = "torch.distributed._shard.sharded_tensor.metadata"


def check(index):
    assert index.tensor_names == ["w"]
    assert index.object_names == ["o"]
    assert index.dtypes == ("float32",)
    assert TensorFlags.from_bits(int(index.tensor_flags[0])) == TensorFlags(requires_grad=True)
    assert index.tensor_shape.tolist() == [4, 3]
    assert index.chunk_offsets.tolist() == [0, 0, 2, 0]
    assert index.chunk_sizes.tolist() == [2, 3, 2, 3]
    assert index.files == ("__0_0.distcp", "__1_0.distcp")
    assert index.chains == (("stream.zstd/1",),)
    assert index.paths == {"w": ("w",), "o": ("x", 3)}
    assert index.info is None
    items = index.chunk_items
    assert (items.file.tolist(), items.offset.tolist(), items.length.tolist()) == ([0, 1], [0, 0], [1500, 1501])
    assert items.framing.tolist() == [Framing.TORCH_ZIP] * 2
    assert not items.checked.any()
    assert not items.lead.any()
    assert np.array_equal(items.stored_bytes, items.length)
    assert index.object_items.chain.tolist() == [1]
    assert index.object_items.framing.tolist() == [Framing.OBJECT]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_stock_writes_is_read(stock, protocol):
    data = stock.pickle(stock.metadata(), protocol=protocol)
    index, end, modules = read_stock(data, file="f")
    check(index)
    assert (end, modules) == (len(data), [])
    check(read_index(data, file="f"))


def variants(stock):
    old_format = stock.call(stock.function(OLD, "MEM_FORMAT_ENCODING"), 0)
    named = stock.call(getattr, stock.memory_format, "TORCH_CONTIGUOUS_FORMAT")
    new_path = stock.call(stock.function("pathlib._local", "PosixPath"), "/", "a")
    meta = stock.StorageMeta(checkpoint_id=new_path, save_id=None, load_id=None, modules=[])
    return {
        "torch 2.15, six properties": stock.metadata(properties=stock.properties(None)),
        "seven properties": stock.metadata(properties=stock.properties(None, "x")),
        "before torch 2.3, enum elsewhere": stock.metadata(properties=stock.properties(memory_format=old_format)),
        "enum member by name": stock.metadata(properties=stock.properties(memory_format=named)),
        "CPython 3.13.0": stock.metadata(storage_meta=meta),
        "no storage meta": stock.metadata(storage_meta="absent", version="absent"),
        "storage meta None": stock.metadata(storage_meta=None, version=None),
        "storage meta without modules": stock.metadata(storage_meta=stock.StorageMeta(checkpoint_id="x")),
    }


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize(
    "variant",
    [
        *("torch 2.15, six properties", "seven properties", "before torch 2.3, enum elsewhere", "enum member by name"),
        *("CPython 3.13.0", "no storage meta", "storage meta None", "storage meta without modules"),
    ],
)
def test_variants_of_versions_are_read(stock, variant, protocol):
    check(read_index(stock.pickle(variants(stock)[variant], protocol=protocol), file="f"))


def test_properties_from_before_torch_2_3_are_read(stock):
    renamed = {stock.TensorProperties: (OLD, "TensorProperties")}
    check(read_index(stock.pickle(stock.metadata(), renamed=renamed), file="f"))


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("module", ["pickle", "_pickle"])
def test_a_pickle_in_the_pickle_is_read(stock, module, protocol):
    inner = stock.pickle(stock.metadata(), protocol=protocol)
    loads = stock.function(module, "loads")
    check(read_index(stock.pickle(stock.call(loads, inner), protocol=protocol), file="f"))
    with pytest.raises(CorruptCheckpointError):
        read_index(stock.pickle(stock.call(loads, inner + b"x"), protocol=protocol), file="f")


def test_planner_data_of_other_planners_is_left_alone(stock):
    assert read_index(stock.pickle(stock.metadata(planner_data=None)), file="f").paths is None
    assert read_index(stock.pickle(stock.metadata(planner_data=[1, "x"])), file="f").paths is None
    assert read_index(stock.pickle(stock.metadata(planner_data={"w": [1]})), file="f").paths is None


PLANNER = "torch.distributed.checkpoint.planner"


def foreign(stock):
    """What frameworks and planners add to an index: attributes of any class."""
    item, plan, kind = (stock.record(name, PLANNER) for name in ("WriteItem", "SavePlan", "WriteItemType"))
    unknown, subclass = stock.record("Unknown", "theirs"), stock.record("Dict", "theirs")
    item_type = stock.call(kind, 1)
    chunk = stock.ChunkStorageMetadata(offsets=stock.size(0), sizes=stock.size(1))
    write = item(index=stock.MetadataIndex(fqn="w", index=None), type=item_type, tensor_data=chunk)
    named = stock.call(getattr, kind, "TENSOR")
    return {
        "plans of all ranks, as Megatron-Core's": [plan(items=[write], storage_data=None, usable=True)] * 2,
        "an enum member by name": named,
        "numpy": {"a": np.arange(3.0), "b": np.float32(1)},
        "calls": stock.call(stock.function("torch._utils", "_rebuild_tensor_v2"), unknown(), 0, (2,)),
        "containers": {"set": {1, 2}, "frozen": frozenset((1,)), "ordered": collections.OrderedDict(a=unknown())},
        "a subclass with items": stock.filled(subclass, [1, 2], {"a": 1}),
        "keys": {unknown(): 1, (unknown(), 2): 3},
        "functions": [stock.function("theirs", "f"), stock.function("os", "system")],
    }


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    "name",
    [
        *("plans of all ranks, as Megatron-Core's", "an enum member by name", "numpy", "calls", "containers"),
        *("a subclass with items", "keys", "functions"),
    ],
)
@pytest.mark.parametrize("field", ["all_local_plans", "planner_data"])
def test_foreign_attributes_are_ignored(stock, field, name, protocol):
    data = stock.pickle(stock.metadata(**{field: foreign(stock)[name]}), protocol=protocol)
    index = read_index(data, file="f")
    if field != "planner_data":
        check(index)
    assert index.tensor_names == ["w"]


def places(stock):
    """Each place of an index that must have a class of stock's, with an unknown class instead."""
    unknown = stock.record("Unknown", "theirs")
    plain = stock.metadata().state
    (first, *_), tensor = plain["storage_data"], plain["state_dict_metadata"]["w"]
    info = stock.StorageInfo(relative_path=unknown(), offset=0, length=1)

    def with_tensor(**changes):
        return {"state_dict_metadata": {"w": stock.TensorStorageMetadata({**tensor.state, **changes})}}

    return {
        "names": {"state_dict_metadata": unknown()},
        "entry": {"state_dict_metadata": {"w": unknown()}},
        "chunks": with_tensor(chunks=unknown()),
        "chunk": with_tensor(chunks=[unknown()]),
        "shape": with_tensor(size=unknown()),
        "properties": with_tensor(properties=unknown()),
        "dtype": with_tensor(properties=stock.TensorProperties((unknown(), 0, False, 0, False))),
        "locations": {"storage_data": unknown()},
        "key": {"storage_data": {unknown(): plain["storage_data"][first]}},
        "location": {"storage_data": {**plain["storage_data"], first: unknown()}},
        "path": {"storage_data": {**plain["storage_data"], first: info}},
    }


@pytest.mark.parametrize(
    "name",
    [
        *("names", "entry", "chunks", "chunk", "shape", "properties", "dtype", "locations", "key", "location", "path"),
    ],
)
def test_unknown_classes_in_fields_of_the_index_are_refused_by_name(stock, name):
    with pytest.raises(UnsafeCheckpointError, match=r"f asks for theirs\.Unknown.*no code was run"):
        read_index(stock.pickle(stock.metadata(**places(stock)[name])), file="f")
    cls = stock.pickle(stock.metadata(), renamed={stock.Metadata: ("theirs", "Unknown")})
    with pytest.raises(UnsafeCheckpointError, match=r"asks for theirs\.Unknown"):
        read_index(cls, file="f")


def test_an_index_of_nothing_stored(stock):
    index = read_index(stock.pickle(stock.metadata(storage_data=None)), file="f")
    assert index.chunk_items is None
    assert index.object_items is None


class Touch:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def hostile(path):
    quoted = f"os.mkdir({path!r})"
    text = b"X" + len(path).to_bytes(4, "little") + path.encode()
    return {
        "reduce": pickle.dumps(Touch(path)),
        "protocol 0": pickle.dumps(Touch(path), protocol=0),
        "eval": pickle.PROTO + b"\x04cbuiltins\neval\n" + pickle.dumps(quoted, 4)[2:-1] + b"\x85R.",
        "inst": b"(" + text + b"ios\nmkdir\n.",
        "obj": b"(cos\nmkdir\n" + text + b"o.",
        "newobj": b"\x80\x02csubprocess\nPopen\n(lp0\n\x85\x81.",
        "newobj_ex": b"\x80\x04csubprocess\nPopen\n)}\x92.",
        "build": b"\x80\x02cbuiltins\nobject\n)\x81}b.",
        "getattr": b"\x80\x02cbuiltins\ngetattr\nctorch\nSize\nX\x05\x00\x00\x00mkdir\x86R.",
        "getattr of a string": b"\x80\x02cbuiltins\ngetattr\nX\x01\x00\x00\x00aX\x07\x00\x00\x00__class\x86R.",
        "dotted": b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93.",
        "torch": b"\x80\x02ctorch\nload\n.",
        "extension": b"\x80\x02\x82\x01.",
        "persistent": b"\x80\x02K\x01Q.",
        "nested": b"\x80\x03cpickle\nloads\nC" + bytes([len(b"cos\nmkdir\n.")]) + b"cos\nmkdir\n.\x85R.",
        "codecs": b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x03\x00\x00\x00hex\x86R.",
        "build on a string": b"\x80\x02X\x01\x00\x00\x00a}b.",
        "call of a record": b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n)R.",
    }


@pytest.mark.parametrize("name", list(hostile("x")))
def test_hostile_pickles_do_not_run(name, tmp_path):
    target = str(tmp_path / "ran")
    with pytest.raises(UnsafeCheckpointError, match="no code was run"):
        read_index(hostile(target)[name], file=".metadata")
    assert list(tmp_path.iterdir()) == []


def test_the_message_names_file_global_and_remedy(tmp_path):
    with pytest.raises(UnsafeCheckpointError, match=r"\.metadata asks for (posix|nt)\.mkdir.*save it again"):
        read_index(pickle.dumps(Touch("x")), file=".metadata")


def repeated(opcodes, times):
    return opcodes * times


def bombs():
    lists = b"\x80\x04]q\x00]h\x00ah\x00a" + b"".join(
        b"q" + bytes([n]) + b"0]h" + bytes([n]) + b"ah" + bytes([n]) + b"a" for n in range(1, 60)
    )
    deep = b"\x80\x04)" + b"\x85" * 200_000
    long_text = b"\x80\x02c_codecs\nencode\nq\x00X" + (100_000).to_bytes(4, "little") + b"a" * 100_000 + b"q\x01"
    return {
        "memo": b"\x80\x02]r\xff\xff\xff\x7f.",
        "length": b"\x80\x04B\xff\xff\xff\xff.",
        "length 8": b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",
        "text 8": b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7fa.",
        "frame": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",
        "long": b"\x80\x04\x8b\xff\xff\xff\x7f.",
        "doubling lists": lists + b".",
        "doubling in a size": lists + b"q\xffctorch\nSize\nh\xff\x85R.",
        "doubling called": lists + b")R.",
        "deep key": deep + b"q\x000}h\x00Ns.",
        "deep value": deep + b".",
        "copied bytes": long_text + b"0X\x06\x00\x00\x00latin1q\x0200" + b"h\x00h\x01h\x02\x86R" * 100_000 + b".",
        "marks": b"\x80\x04" + b"(" * 200_000 + b".",
    }


@pytest.mark.parametrize("name", list(bombs()))
def test_bombs_are_refused_at_once(name):
    data = bombs()[name]
    tracemalloc.start()
    start = time.process_time()
    try:
        with pytest.raises((CorruptCheckpointError, UnsafeCheckpointError)):
            read_index(data, file="f")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000 + 200 * len(data)
    assert time.process_time() - start < 20  # against what would take hours


def test_shared_lists_do_not_multiply(stock):
    """Thousands of tensors that share one list of thousands of chunks."""
    chunk = stock.ChunkStorageMetadata(offsets=stock.size(0), sizes=stock.size(1))
    shared = [chunk] * 3000
    tensors = {
        str(n): stock.TensorStorageMetadata(properties=stock.properties(), size=stock.size(1), chunks=shared)
        for n in range(300)
    }
    with pytest.raises(CorruptCheckpointError, match="more chunks than bytes"):
        read_index(stock.pickle(stock.metadata(state_dict_metadata=tensors)), file="f")


@pytest.mark.parametrize(
    "change",
    [
        {"state_dict_metadata": {"w": 5}},
        {"state_dict_metadata": []},
        {"state_dict_metadata": "absent"},
        {"storage_data": {}},
        {"storage_data": []},
    ],
)
def test_nonsense_is_refused(stock, change):
    with pytest.raises(CorruptCheckpointError):
        read_index(stock.pickle(stock.metadata(**change)), file="f")


@pytest.mark.parametrize(("offset", "length"), [(-1, 5), (0, -5), (0.5, 5), ("0", 5), (2**64, 5), (None, 5)])
def test_places_that_are_none_are_refused(stock, offset, length):
    storage = stock.metadata().state["storage_data"]
    for info in storage.values():
        info.state.update(offset=offset, length=length)
    with pytest.raises(CorruptCheckpointError):
        read_index(stock.pickle(stock.metadata(storage_data=storage)), file="f")


def test_a_path_that_leads_elsewhere_is_refused(stock):
    storage = stock.metadata().state["storage_data"]
    for info in storage.values():
        info.state["relative_path"] = "../x"
    with pytest.raises(UnsafeCheckpointError, match=r"\.\./x"):
        read_index(stock.pickle(stock.metadata(storage_data=storage)), file="f")


def test_bytes_behind_the_pickle_are_refused(stock):
    data = stock.pickle(stock.metadata())
    assert read_stock(data + b"more", file="f")[1] == len(data)
    with pytest.raises(CorruptCheckpointError, match="followed by bytes"):
        read_index(data + b"more", file="f")


def test_the_marker_alone_is_refused(stock):
    meta = stock.StorageMeta(checkpoint_id=None, save_id="x", load_id=None, modules=["dcp-manifest/1"])
    with pytest.raises(CorruptCheckpointError, match="lost its manifest"):
        read_index(stock.pickle(stock.metadata(storage_meta=meta)), file="f")


def test_every_truncation_is_refused(stock):
    data = stock.pickle(stock.metadata())
    for length in range(len(data)):
        with pytest.raises(CorruptCheckpointError):
            read_index(data[:length], file="f")


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_damaged_pickles_raise_nothing_but_our_errors(stock, data):
    damaged = bytearray(stock.pickle(stock.metadata(), protocol=data.draw(st.sampled_from([2, 4]))))
    for _ in range(data.draw(st.integers(1, 5))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CorruptCheckpointError, UnsafeCheckpointError, UnsupportedFormatError):
        read_index(bytes(damaged), file="f")


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_raises_nothing_but_our_errors(data):
    with pytest.raises((CorruptCheckpointError, UnsafeCheckpointError)):
        read_index(data, file="f")
