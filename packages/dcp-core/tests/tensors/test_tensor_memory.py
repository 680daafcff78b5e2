from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from dcp_core import load, save
from dcp_core.errors import UnsupportedValueError
from dcp_core.storage.storage_writer import tensor_payload
from dcp_core.tensors.tensor_memory import (
    BoxCopy,
    DeviceCopies,
    TensorPieces,
    check_tensor,
    element_boxes,
    has_memory,
    tensor_bytes,
)
from integration_tests.kits.memory import MemoryReader, MemoryWriter

DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.complex64, torch.int64, torch.float8_e4m3fn]


@st.composite
def boxes(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    sizes = draw(st.lists(st.integers(1, 6), max_size=5))
    offsets = [draw(st.integers(0, size)) for size in sizes]
    lengths = [draw(st.integers(0, size - offset)) for size, offset in zip(sizes, offsets, strict=True)]
    return sizes, offsets, lengths


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.data())
def test_a_range_of_elements_is_few_boxes(sizes: list[int], data: st.DataObject) -> None:
    count = math.prod(sizes)
    start = data.draw(st.integers(0, count - 1))
    stop = data.draw(st.integers(start + 1, count))
    flat = torch.arange(count).reshape(sizes)
    found = []
    for offsets, lengths in element_boxes(sizes, start, stop):
        part = flat[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
        found.append(part.reshape(-1).tolist())
    assert list(itertools.chain(*found)) == list(range(start, stop))
    assert len(found) <= 2 * len(sizes) - 1


def filled(sizes: list[int], dtype: torch.dtype) -> torch.Tensor:
    count = math.prod(sizes)
    if dtype.is_floating_point or dtype.is_complex:
        return (torch.arange(count, dtype=torch.float32) % 120).to(dtype).reshape(sizes)
    return torch.arange(count).to(dtype).reshape(sizes)


def target_of(lengths: list[int], dtype: torch.dtype, order: list[int], *, gaps: bool) -> torch.Tensor:
    """A tensor of zeros whose dimensions lie in memory in that order, with or without room between elements."""
    stretch = 2 if gaps else 1
    memory = torch.zeros([lengths[dim] * stretch for dim in order], dtype=dtype)
    view = memory[tuple(slice(None, None, stretch) for _ in order)]
    return view.permute([order.index(dim) for dim in range(len(order))])


@given(boxes(), st.sampled_from(DTYPES), st.booleans(), st.booleans(), st.data())
def test_pieces_in_any_order_fill_any_target(
    box: tuple[list[int], list[int], list[int]], dtype: torch.dtype, cast: bool, gaps: bool, data: st.DataObject
) -> None:
    sizes, offsets, lengths = box
    chunk = filled(sizes, dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else dtype
    order = data.draw(st.permutations(range(len(sizes))))
    target = target_of(lengths, wide if cast else dtype, list(order), gaps=gaps)
    count = math.prod(sizes)
    borders = sorted({0, count, *data.draw(st.lists(st.integers(0, count), max_size=5))})
    pieces = data.draw(st.permutations(list(itertools.pairwise(borders))))
    copier = BoxCopy(sizes, dtype, offsets, target, DeviceCopies().copy)
    for start, stop in pieces:
        stored = bytearray(tensor_bytes(chunk)[start * dtype.itemsize : stop * dtype.itemsize])
        copier.piece(start * dtype.itemsize, memoryview(stored))
    wanted = chunk[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
    assert torch.equal(target.to(wide), wanted.to(wide))


def test_what_is_outside_of_the_box_is_not_touched() -> None:
    whole = torch.full((4, 6), -1)
    copier = BoxCopy((4, 6), torch.int64, (1, 2), whole[1:3, 2:5], DeviceCopies().copy)
    copier.piece(0, tensor_bytes(torch.arange(24)))
    assert whole[1:3, 2:5].tolist() == [[8, 9, 10], [14, 15, 16]]
    assert (whole == -1).sum() == 24 - 6


@pytest.mark.device
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["plain", "cast"])
@pytest.mark.parametrize("strided", [False, True])
def test_pieces_reach_a_device_through_reused_buffers(device: str, dtype: torch.dtype, strided: bool) -> None:
    chunk = torch.rand(512, 1024)
    memory = torch.zeros(512, 1024, dtype=dtype, device=device)
    target = memory.t()[:512].t() if strided else memory[:, :512].contiguous()
    copies = DeviceCopies()
    copies.prepare(target)
    copier = BoxCopy((512, 1024), torch.float32, (0, 0), target, copies.copy)
    scratch = torch.empty(64 << 10, dtype=torch.uint8)
    stored = tensor_bytes(chunk)
    for start in range(0, len(stored), len(scratch)):
        scratch.numpy()[:] = stored[start : start + len(scratch)]
        copier.piece(start, tensor_bytes(scratch))
    copies.finish(target.device)
    assert torch.equal(target.cpu(), chunk[:, :512].to(dtype))


VIEWED_DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128, torch.bool]


def values(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 2, shape, generator=generator).to(dtype) + torch.ones((), dtype=dtype)


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """Tensors that share memory with larger ones, in any order of dimensions."""
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    tensor = values(shape, draw(st.sampled_from(VIEWED_DTYPES)))
    tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    for dim in range(tensor.dim()):
        start = draw(st.integers(0, tensor.size(dim) - 1))
        tensor = tensor.narrow(dim, start, draw(st.integers(0, tensor.size(dim) - start)))
    return tensor


@settings(max_examples=300, deadline=None)
@given(views(), st.integers(1, 2000))
def test_pieces_are_the_row_major_elements(tensor, max_bytes):
    source = TensorPieces(tensor)
    pieces = [bytes(piece) for piece in source.pieces(max_bytes)]
    assert b"".join(pieces) == bytes(tensor_bytes(tensor.contiguous()))
    assert source.nbytes == sum(map(len, pieces))
    assert all(len(piece) <= max(max_bytes, tensor.dtype.itemsize) for piece in pieces)


@pytest.mark.parametrize("view", [torch.conj, lambda tensor: tensor.conj().imag], ids=["conjugated", "negated"])
def test_lazy_views_are_resolved(view):
    tensor = view(torch.complex(torch.arange(6.0), torch.arange(6.0) + 1).reshape(2, 3))
    assert tensor.is_conj() or tensor.is_neg()
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    assert b"".join(map(bytes, TensorPieces(tensor).pieces(16))) == bytes(tensor_bytes(plain))


def test_what_can_be_written_from_its_own_memory_is():
    tensor = torch.zeros(1 << 18)
    assert tensor_payload("t", tensor).data.obj.ctypes.data == tensor.data_ptr()
    assert isinstance(tensor_payload("t", tensor.view(512, 512).t()).data, TensorPieces)
    assert isinstance(tensor_payload("t", tensor.view(512, 512)[:8, :8]).data, memoryview)


@pytest.mark.device
@pytest.mark.parametrize("max_bytes", [1 << 12, 1 << 20, 1 << 30])
def test_pieces_come_from_a_device_while_it_computes(device, max_bytes):
    tensor = torch.zeros(1 << 20, device=device)
    for _ in range(50):
        tensor += 1
    for view in (tensor, tensor.view(1024, 1024).t(), tensor[3:-5]):
        data = b"".join(map(bytes, TensorPieces(view).pieces(max_bytes)))
        assert data == bytes(tensor_bytes(view.cpu().contiguous()))
        assert (torch.frombuffer(bytearray(data), dtype=torch.float32) == 50).all()


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(2)


def nested(layout: torch.layout) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=layout)


def freed(tensor: torch.Tensor, left: int = 0) -> torch.Tensor:
    """A tensor whose storage was taken away, as FSDP does; `left`: bytes that it still has."""
    tensor.untyped_storage().resize_(left)
    return tensor


REFUSED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "meta": (lambda: torch.empty(2, device="meta"), "to_empty"),
    "sparse": (lambda: torch.eye(2).to_sparse(), "layout sparse_coo.*to_dense"),
    "csr": (lambda: torch.eye(2).to_sparse_csr(), "layout sparse_csr"),
    "nested": (lambda: nested(torch.strided), "unbind"),
    "jagged": (lambda: nested(torch.jagged), "layout jagged"),
    "fake": (fake, "has no data"),
    "freed": (lambda: freed(torch.zeros(100)), "freed or resized.*gather"),
    "freed parameter": (lambda: freed(torch.nn.Parameter(torch.zeros(100))), "400 bytes, but its storage holds 0"),
    "one byte short": (lambda: freed(torch.zeros(10), 39), "40 bytes, but its storage holds 39"),
    "freed view": (lambda: freed(torch.zeros(10, 10)[:, 3]), "freed or resized"),
    "short view": (lambda: freed(torch.zeros(10, 10)[5:, ::3][:, 1:], 399), "freed or resized"),
    "freed and conjugated": (lambda: freed(torch.zeros(9, dtype=torch.complex64).conj()), "freed or resized"),
    "no zeros": (lambda: torch._efficientzerotensor(5), "storage holds 0"),
    "lazy": (torch.nn.parameter.UninitializedParameter, "run the module once"),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_refused_with_name_and_remedy(kind: str) -> None:
    build, words = REFUSED[kind]
    with pytest.raises(UnsupportedValueError, match=rf"^'layer\.w' .*{words}"):
        check_tensor("layer.w", build())


class Tagged(torch.Tensor):
    """An ordinary subclass: its data are its own."""


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2),
        torch.zeros(0),
        torch.tensor(1),
        torch.nn.Parameter(torch.zeros(2)),
        torch.nn.Buffer(torch.zeros(2)),
        torch.zeros(2).as_subclass(Tagged),
        torch.zeros(2, 3)[:, 1].expand(4, 2),
        torch.zeros(2, dtype=torch.complex64).conj(),
        freed(torch.zeros(10, 10)[5:, ::3][:, 1:3], 392),
        freed(torch.zeros(0)),
        torch.zeros(5)[5:],
    ],
)
def test_accepted(tensor: torch.Tensor) -> None:
    check_tensor("w", tensor)


def test_meta_can_be_allowed() -> None:
    check_tensor("w", torch.empty(2, device="meta"), allow_meta=True)


@pytest.mark.parametrize("count", [3, 10_000])
def test_memory_that_was_freed_is_neither_saved_nor_loaded_into(request: pytest.FixtureRequest, count: int) -> None:
    name = request.node.name
    with pytest.raises(UnsupportedValueError, match=r"'m\.w'.*freed or resized"):
        save({"m": {"w": freed(torch.ones(count))}}, storage_writer=MemoryWriter(name))
    save({"m": {"w": torch.ones(count)}}, storage_writer=MemoryWriter(name))
    with pytest.raises(UnsupportedValueError, match=r"'m\.w'.*freed or resized"):
        load({"m": {"w": freed(torch.ones(count))}}, storage_reader=MemoryReader(name))


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation:UserWarning")
def test_what_packs_its_elements_has_memory() -> None:
    assert has_memory(torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.quint4x2))
