"""Tensors and objects as bytes."""

import pytest
import torch

from dcp_core.errors import UnsupportedValueError
from dcp_core.storage.storage_writer import tensor_payload
from dcp_core.tensors.tensor_memory import tensor_bytes
from dcp_manifest.index.columns import Framing


def test_contiguous_tensors_are_not_copied() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    payload = tensor_payload("x", tensor)
    tensor[0, 0] = 7.0
    assert torch.frombuffer(payload.data, dtype=torch.float32)[0] == 7.0
    assert (payload.framing, payload.dtype, payload.sizes) == (Framing.RAW, "float32", (2, 3))


@pytest.mark.parametrize(
    "tensor",
    [torch.arange(6.0).reshape(2, 3).t(), torch.arange(4) + 1j, torch.tensor(2.5), torch.arange(3.0).expand(2, 3)],
    ids=["transposed", "complex", "scalar", "expanded"],
)
def test_payload_is_row_major(tensor: torch.Tensor) -> None:
    payload = tensor_payload("x", tensor)
    assert bytes(payload.data) == tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_conjugate_views_are_resolved() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert torch.equal(torch.frombuffer(tensor_payload("x", tensor).data, dtype=torch.complex64), tensor.resolve_conj())


def test_empty_tensor_has_no_bytes() -> None:
    assert len(tensor_payload("x", torch.empty(0, 4)).data) == 0


def test_plain_subclasses_are_saved_as_tensors() -> None:
    class Marked(torch.Tensor):
        pass

    assert tensor_payload("x", torch.ones(2).as_subclass(Marked)).framing is Framing.RAW


def test_quantized_and_self_describing_tensors_are_archives() -> None:
    payload = tensor_payload("x", torch.ones(2), self_describing=True)
    assert payload.framing is Framing.TORCH_ZIP


@pytest.mark.parametrize(
    ("tensor", "words"),
    [(torch.ones(2, device="meta"), "meta"), (torch.ones(2, 2).to_sparse(), "sparse")],
    ids=["meta", "sparse"],
)
def test_tensors_without_plain_memory_are_refused(tensor: torch.Tensor, words: str) -> None:
    with pytest.raises(UnsupportedValueError, match=words) as caught:
        tensor_payload("layer.weight", tensor)
    assert "layer.weight" in str(caught.value)


@pytest.mark.parametrize("count", [3, 20_000])
def test_looking_at_the_bytes_leaves_storages_resizable(count: int) -> None:
    """`Tensor.numpy` forbids `resize_` for good, which FSDP needs; looking at a tensor must not change it."""
    tensors = {dtype: torch.ones(count, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.complex128)}
    for tensor in tensors.values():
        view = tensor_bytes(tensor)
        assert (len(view), view.readonly, view.format) == (tensor.nbytes, False, "B")
        tensor_payload("w", tensor)
        del view
        tensor.untyped_storage().resize_(0)


def test_the_bytes_of_a_tensor_hold_its_memory() -> None:
    view = tensor_bytes(torch.full((100_000,), 7, dtype=torch.uint8))
    others = [torch.zeros(100_000, dtype=torch.uint8) for _ in range(20)]
    assert bytes(view) == b"\x07" * 100_000
    assert len(others) == 20
