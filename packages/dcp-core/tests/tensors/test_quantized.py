from __future__ import annotations

import uuid
from collections.abc import Callable
from functools import partial

import pytest
import torch

from dcp_core import DefaultLoadPlanner, UnsupportedValueError, load, load_keys, save
from dcp_core.tensors.quantized import empty_like_part
from dcp_core.testing.memory import MemoryReader, MemoryWriter

pytestmark = [  # of torch itself
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]


def per_tensor(seed: int) -> torch.Tensor:
    values = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
    return torch.quantize_per_tensor(values, 0.1 * seed, seed, torch.qint8)


def per_channel(seed: int) -> torch.Tensor:
    values = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
    scales = torch.linspace(0.1, 0.1 * seed + 0.2, 4, dtype=torch.float64)
    return torch.quantize_per_channel(values, scales, torch.zeros(4, dtype=torch.long), 0, torch.qint8)


MAKERS = pytest.mark.parametrize("make", [per_tensor, per_channel])


def saved(tensor: torch.Tensor) -> MemoryReader:
    folder = uuid.uuid4().hex
    save({"q": tensor, "other": torch.ones(2)}, storage_writer=MemoryWriter(folder))
    return MemoryReader(folder)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.qscheme() == other.qscheme() and torch.equal(one.dequantize(), other.dequantize())


@MAKERS
def test_whole_tensors_come_back_with_their_scale(make: Callable[[int], torch.Tensor]) -> None:
    reader = saved(make(1))
    found = load_keys(storage_reader=reader)["q"]
    assert same(found, make(1))
    template = make(2)
    address = template.data_ptr()
    load({"q": template}, storage_reader=reader)
    assert same(template, make(1))
    assert template.data_ptr() == address


def test_a_template_without_a_quantizer() -> None:
    template = torch.empty(4, 3, dtype=torch.qint8)
    state = {"q": template}
    load(state, storage_reader=saved(per_channel(1)))
    assert state["q"] is template
    assert same(template, per_channel(1))


@MAKERS
def test_tensors_without_elements_come_back_with_their_scale(make: Callable[[int], torch.Tensor]) -> None:
    empty = make(1)[:, :0]
    reader = saved(empty)
    template = make(2)[:, :0]
    load({"q": template}, storage_reader=reader)
    bare = torch.empty(4, 0, dtype=torch.qint8)
    load({"q": bare}, storage_reader=reader)
    for found in (load_keys(storage_reader=reader)["q"], template, bare):
        assert repr(found) == repr(empty)


EMPTY_COLUMNS = partial(
    torch._empty_per_channel_affine_quantized,
    axis=1,
    scales=torch.ones(4),
    zero_points=torch.arange(4),
    dtype=torch.qint8,
)


def test_the_whole_of_parts_without_elements_has_their_quantizer() -> None:
    part = per_tensor(1)[:0]
    assert repr(empty_like_part("q", part, (0, 3))) == repr(part)
    assert repr(empty_like_part("q", part, (0, 7))) == repr(per_tensor(1).reshape(1, 12)[:0, :7])
    assert repr(empty_like_part("q", EMPTY_COLUMNS((0, 4, 2)), (0, 4, 5))) == repr(EMPTY_COLUMNS((0, 4, 5)))


def test_a_part_without_elements_may_lack_scales_of_the_whole() -> None:
    with pytest.raises(UnsupportedValueError, match=r"'q' has no elements, and its quantizer .* is sharded"):
        empty_like_part("q", EMPTY_COLUMNS((0, 4)), (0, 8))


@MAKERS
def test_floating_point_templates_get_the_values_if_allowed(make: Callable[[int], torch.Tensor]) -> None:
    template = torch.zeros(4, 3)
    load({"q": template}, storage_reader=saved(make(1)), planner=DefaultLoadPlanner(allow_lossy_casts=True))
    assert torch.equal(template, make(1).dequantize())


def test_another_scheme_is_refused() -> None:
    template = per_channel(2)
    with pytest.raises(UnsupportedValueError, match=r"'q' is stored quantized with .*per_tensor_affine.*per_channel"):
        load({"q": template}, storage_reader=saved(per_tensor(1)))
    assert same(template, per_channel(2))


@pytest.mark.parametrize("seed", [1, 2])
def test_parts_must_have_the_stored_scale(seed: int) -> None:
    class Upper(DefaultLoadPlanner):
        """Gives a view of the template's tensor, as planners that shard by hand do."""

        def lookup_tensor(self, index):
            return self.state_dict[index.fqn][:]

    template = per_tensor(seed)
    if seed == 1:
        load({"q": template}, storage_reader=saved(per_tensor(1)), planner=Upper())
        assert same(template, per_tensor(1))
    else:
        with pytest.raises(UnsupportedValueError, match="scale"):
            load({"q": template}, storage_reader=saved(per_tensor(1)), planner=Upper())
