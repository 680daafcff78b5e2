"""torch's rebuilding functions with arguments that reach beyond what is stored: refused, and nothing is allocated."""

from __future__ import annotations

import collections
import io
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_core.errors import CorruptCheckpointError
from dcp_core.objects.object_bytes import load_object, load_tensor
from integration_tests.kits.crafted_objects import Call, Stored, archived

NO_HOOKS: Any = collections.OrderedDict()
V1, V2, V3 = torch._utils._rebuild_tensor, torch._utils._rebuild_tensor_v2, torch._utils._rebuild_tensor_v3
SPARSE, NESTED = torch._utils._rebuild_sparse_tensor, torch._utils._rebuild_nested_tensor
QUANTIZED, FROM_CPU = torch._utils._rebuild_qtensor, torch._utils._rebuild_device_tensor_from_cpu_tensor
FROM_TYPE, PARAMETER = torch._tensor._rebuild_from_type_v2, torch._utils._rebuild_parameter
WITH_STATE, WRAPPER = torch._utils._rebuild_parameter_with_state, torch._utils._rebuild_wrapper_subclass


def storage(kind: Any, count: int, key: str = "0") -> Stored:
    return Stored("storage", kind, key, "cpu", count)


FLOATS = storage(torch.FloatStorage, 16)
PLAIN = (FLOATS, 0, (4,), (1,), False, NO_HOOKS)
COO, CSR = (Call(torch.serialization._get_layout, f"torch.sparse_{name}") for name in ("coo", "csr"))
BYTES = storage(torch.ByteStorage, 64)
RECORD = np.arange(16, dtype=np.float32).tobytes()
AFFINE = (torch.per_tensor_affine, 0.1, 0)


def tensor(size: Any = (4,), stride: Any = (1,), offset: Any = 0, storage: Any = FLOATS) -> Call:
    return Call(V2, storage, offset, size, stride, False, NO_HOOKS)


def longs(*values: int) -> Call:
    """Numbers from a record of so many."""
    count = len(values)
    return Call(V2, storage(torch.LongStorage, count, f"n{count}"), 0, (count,), (1,), False, NO_HOOKS)


def quantized(parameters: Any, size: Any = (4,)) -> Call:
    return Call(QUANTIZED, storage(torch.QInt8Storage, 64), 0, size, (1,), parameters, False, NO_HOOKS)


def table(rows: int) -> Call:
    return Call(V2, storage(torch.LongStorage, 4, "n4"), 0, (rows, 4 // rows), (4 // rows, 1), False, NO_HOOKS)


REFUSED: dict[str, Call] = {
    "size beyond the storage": tensor((17,)),
    "size that would let the storage grow": tensor((1 << 33,)),
    "stride beyond the storage": tensor((2,), (16,)),
    "offset beyond the storage": tensor((4,), (1,), 13),
    "offset of nothing beyond the storage": tensor((0,), (1,), 1 << 40),
    "negative size": tensor((-1,)),
    "negative stride": tensor((2,), (-1,), 4),
    "negative offset": tensor((4,), (1,), -1),
    "more elements than can be counted": tensor((1 << 40, 1 << 40), (0, 0)),
    "strides of another dimension": tensor((2, 2), (1,)),
    "sizes of bools": tensor((True,)),
    "no storage": tensor(storage=7),
    "a class as storage": tensor(storage=torch.FloatStorage),
    "old function": Call(V1, FLOATS, 0, (17,), (1,)),
    "other dtype": Call(V3, BYTES, 0, (17,), (1,), False, NO_HOOKS, torch.float32),
    "no dtype": Call(V3, BYTES, 0, (4,), (1,), False, NO_HOOKS, 7),
    "backward hooks": Call(V2, FLOATS, 0, (4,), (1,), True, collections.OrderedDict({0: dict})),
    "conjugate of real numbers": Call(V2, FLOATS, 0, (4,), (1,), False, NO_HOOKS, {"conj": True}),
    "unknown metadata": Call(V2, FLOATS, 0, (4,), (1,), False, NO_HOOKS, {"other": True}),
    "storage larger than its record": tensor(storage=storage(torch.FloatStorage, 17)),
    "storage of another record": tensor(storage=storage(torch.FloatStorage, 4, "../0")),
    "negative storage": tensor(storage=storage(torch.FloatStorage, -4)),
    "storage of two sizes": Call(FROM_CPU, tensor(), tensor(storage=storage(torch.ByteStorage, 4)), 1, 0),
    "id of no storage": tensor(storage=Stored("module", torch.FloatStorage, "0", "cpu", 4)),
    "torch.Tensor": Call(torch.Tensor, 4),
    "torch.FloatTensor": Call(torch.FloatTensor, 4),
    "UntypedStorage": Call(torch.UntypedStorage, 4),
    "TypedStorage": Call(torch.TypedStorage, 4),
    "huge size": Call(torch.Size, (1 << 70,)),
    "size of a tuple": Call(torch.Size, ((1,),)),
    "device of a text": Call(torch.device, "x" * 1000),
    "sparse index beyond the size": Call(SPARSE, COO, (table(1), tensor(), (2,))),
    "sparse sizes that overflow": Call(SPARSE, COO, (table(1), tensor(), (1 << 62, 1 << 62))),
    "compressed index beyond the size": Call(SPARSE, CSR, (longs(0, 4), longs(0, 1, 2, 9), tensor(), (1, 2))),
    "nested beyond its buffer": Call(NESTED, tensor((16,)), table(2), table(2), longs(9, 9)),
    "nested of other lengths": Call(NESTED, tensor((16,)), table(2), table(1), longs(9, 9)),
    "quantized beyond the storage": quantized(AFFINE, (1 << 40,)),
    "quantized axis": quantized((torch.per_channel_affine, [0.1] * 4, [0] * 4, 7), (4,)),
    "quantized scales": quantized((torch.per_channel_affine, [0.1], [0], 0), (4,)),
    "expanded, and then copied": Call(FROM_CPU, tensor((1 << 33,), (0,)), torch.float64, "cpu", False),
    "another function behind a type": Call(FROM_TYPE, list, list, (Call(range, 1 << 27),), {}),
    "another class behind a type": Call(FROM_TYPE, V2, dict, PLAIN, {}),
    "attributes that hide a method": Call(FROM_TYPE, V2, torch.Tensor, PLAIN, {"detach": list}),
    "a class of its own": Call(WITH_STATE, tensor(), True, NO_HOOKS, {"__class__": dict}),
    "data by an attribute": Call(WITH_STATE, tensor(), True, NO_HOOKS, {"data": tensor()}),
    "parameter of a list": Call(PARAMETER, [1], True, NO_HOOKS),
    "wrapper of torch's own class": Call(
        WRAPPER, torch.Tensor, torch.float32, (4,), (1,), 0, torch.strided, torch.device("cpu"), False
    ),
}  # fmt: skip


def load(value: object) -> Any:
    numbers = {"n4": np.array([0, 1, 2, 9]).tobytes(), "n2": np.array([0, 9]).tobytes()}
    return load_object(archived(value, **{"0": RECORD}, **numbers), key="k")


def test_the_arguments_that_others_are_changes_of_are_allowed() -> None:
    assert load(tensor()).tolist() == [0, 1, 2, 3]
    assert load(Call(V3, BYTES, 1, (2, 3), (3, 1), False, NO_HOOKS, torch.float32)).tolist() == [[1, 2, 3], [4, 5, 6]]
    assert load(tensor((5,), (0,), 15)).tolist() == [15.0] * 5
    assert load(tensor((0, 1 << 40), (1, 1))).shape == (0, 1 << 40)
    named = load(Call(FROM_TYPE, V2, torch.Tensor, PLAIN, {"note": 1}))
    assert named.note == 1


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    with pytest.raises(CorruptCheckpointError, match="cannot be read"):
        load(REFUSED[name])
    with pytest.raises(CorruptCheckpointError, match="cannot be read"):
        load([{"deep": (REFUSED[name],)}])


EXTENTS = st.lists(st.integers(0, 9) | st.sampled_from([1 << 31, 1 << 62, -1]), max_size=3)


@settings(max_examples=300, deadline=None)
@given(EXTENTS, EXTENTS, st.integers(-1, 20))
def test_a_tensor_is_within_its_storage_or_refused(size: list[int], stride: list[int], offset: int) -> None:
    try:
        found = load(tensor(tuple(size), tuple(stride), offset))
    except CorruptCheckpointError:
        return
    assert found.untyped_storage().nbytes() == len(RECORD)
    last = offset + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))
    assert 0 in size or last < 16


def subclasses() -> list[torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [
            torch.eye(2).to_sparse_csr(),
            torch.eye(4).to_sparse_bsr((2, 2)),
            torch.eye(2).to_sparse_csc(),
            torch.eye(2).to_sparse().coalesce(),
            torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2), 1, torch.qint8),
            torch.ones(2, device="meta"),
            torch.tensor([1j, 2]).conj(),
            torch.tensor([1j, 2]).conj().imag,
            torch.ones(1).expand(3, 4),
        ]


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, about sparse and quantised tensors
@pytest.mark.parametrize("number", range(len(subclasses())))
def test_tensors_of_every_kind_are_as_torch_loads_them(number: int) -> None:
    buffer = io.BytesIO()
    torch.save(subclasses()[number], buffer)
    expected = torch.load(io.BytesIO(buffer.getvalue()))
    with torch.device("meta"):  # what a user has set for new tensors is not for these
        found = load_tensor(memoryview(buffer.getvalue()), key="w")
    assert repr(found) == repr(expected)
    assert (found.layout, found.dtype, found.is_conj()) == (expected.layout, expected.dtype, expected.is_conj())


def test_a_tensor_is_what_a_tensor_item_holds() -> None:
    with pytest.raises(TypeError, match="a list is stored where a tensor should be"):
        load_tensor(archived([1]), key="w")


def test_a_storage_is_shared_where_it_was() -> None:
    base = torch.arange(4.0)
    buffer = io.BytesIO()
    torch.save([base, base[1:]], buffer)
    first, second = load_object(buffer.getvalue(), key="k")
    second[0] = 9
    assert first.tolist() == [0, 9, 2, 3]
