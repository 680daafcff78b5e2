from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dcp_core import load, save
from dcp_core.errors import UnsupportedValueError
from dcp_core.shards.tensor_checks import check_tensor, has_memory
from dcp_core.testing.memory import MemoryReader, MemoryWriter


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(2)


def nested(layout: torch.layout) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=layout)


class Wrapper(torch.Tensor):
    """Holds its data in an attribute and cannot be flattened."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.size())

    @classmethod
    def __torch_dispatch__(cls, *args: object, **kwargs: object) -> object:
        raise NotImplementedError


class Flat(Wrapper):
    """Tells what it wraps, as quantised weights do."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: object, ctx: object, size: object, stride: object) -> None:
        raise NotImplementedError


def freed(tensor: torch.Tensor, left: int = 0) -> torch.Tensor:
    """A tensor whose storage was taken away, as FSDP does; `left`: bytes that it still has."""
    tensor.untyped_storage().resize_(left)
    return tensor


REFUSED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "meta": (lambda: torch.empty(2, device="meta"), "to_empty"),
    "sparse": (lambda: torch.eye(2).to_sparse(), "layout sparse_coo.*to_dense"),
    "csr": (lambda: torch.eye(2).to_sparse_csr(), "layout sparse_csr"),
    "nested": (lambda: nested(torch.strided), "unbind"),
    "jagged": (lambda: nested(torch.jagged), "wraps other tensors"),
    "fake": (fake, "has no data"),
    "wrapper": (lambda: Wrapper(torch.zeros(2)), "keeps its data elsewhere"),
    "flattenable": (lambda: Flat(torch.zeros(2)), "__tensor_flatten__"),
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
