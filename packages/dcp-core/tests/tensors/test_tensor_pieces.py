from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_core.encoding.payloads import tensor_payload
from dcp_core.tensors.tensor_bytes import tensor_bytes
from dcp_core.tensors.tensor_pieces import TensorPieces

DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128, torch.bool]


def values(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 2, shape, generator=generator).to(dtype) + torch.ones((), dtype=dtype)


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """Tensors that share memory with larger ones, in any order of dimensions."""
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    tensor = values(shape, draw(st.sampled_from(DTYPES)))
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


@pytest.mark.gpu
@pytest.mark.parametrize("max_bytes", [1 << 12, 1 << 20, 1 << 30])
def test_pieces_come_from_a_device_while_it_computes(max_bytes):
    tensor = torch.zeros(1 << 20, device="cuda")
    for _ in range(50):
        tensor += 1
    for view in (tensor, tensor.view(1024, 1024).t(), tensor[3:-5]):
        data = b"".join(map(bytes, TensorPieces(view).pieces(max_bytes)))
        assert data == bytes(tensor_bytes(view.cpu().contiguous()))
