from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.masked import MaskedTensor

from dcp_core import (
    CorruptCheckpointError,
    DefaultLoadPlanner,
    LoadMismatchError,
    UnsafeCheckpointError,
    UnsupportedValueError,
    load,
    load_keys,
    save,
)
from dcp_core.tensors.kinds import archive_wrapper, clone_tensor, empty_like_part
from integration_tests.kits.memory import MemoryReader, MemoryWriter
from integration_tests.kits.wrapper_tensors import WRAPPER_GLOBALS, BlockOptions, BlockTensor, MethodTensor


@pytest.fixture
def allowed() -> Iterator[None]:
    with torch.serialization.safe_globals(WRAPPER_GLOBALS):
        yield


def values(shape: tuple[int, ...] = (8, 4), seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_offset(seed: int) -> torch.Tensor:
    plain = BlockTensor.of(values(seed=seed))
    return BlockTensor(plain.codes, plain.scale, plain.options, torch.full((1,), float(seed)))


def of_view(seed: int) -> torch.Tensor:
    """Inner tensors are parts of larger storages, as in a sharded model."""
    plain = BlockTensor.of(values((16, 4), seed=seed))
    return BlockTensor(plain.codes[4:12], plain.scale[4:12], plain.options)


KINDS: dict[str, Callable[[int], torch.Tensor]] = {
    "block": lambda seed: BlockTensor.of(values(seed=seed)),
    "inner tensor that may be None": with_offset,
    "method": lambda seed: MethodTensor.of(values(seed=seed)),
    "parameter": lambda seed: torch.nn.Parameter(BlockTensor.of(values(seed=seed)), requires_grad=False),
    "no elements": lambda seed: BlockTensor(torch.zeros(0, 4, dtype=torch.int8), torch.zeros(0), BlockOptions()),
    "parts of storages": of_view,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("allowed")
def test_round_trip_is_bit_equal(kind: str, tmp_path: Path) -> None:
    saved, template = KINDS[kind](1), KINDS[kind](2)
    save({"m": {"w": saved}, "plain": values()}, checkpoint_id=tmp_path / "c")
    state: dict[str, Any] = {"m": {"w": template}, "plain": torch.zeros(8, 4)}
    load(state, checkpoint_id=tmp_path / "c")
    assert state["m"]["w"] is template
    assert torch.equal(template.dequantize(), saved.dequantize())
    filled: dict[str, Any] = {"m": {}}
    load(filled, checkpoint_id=tmp_path / "c")
    for found in (load_keys(checkpoint_id=tmp_path / "c")["m"]["w"], filled["m"]["w"]):
        assert torch.equal(found.dequantize(), saved.dequantize())
        assert type(found) is (type(saved.detach()) if saved.numel() else torch.Tensor)


@pytest.mark.usefixtures("allowed")
def test_a_tensor_that_is_not_stored_is_missing_whatever_its_address_is(tmp_path: Path) -> None:
    save({"a": KINDS["block"](1)}, checkpoint_id=tmp_path / "c")
    with pytest.raises(LoadMismatchError, match="Missing key in checkpoint state_dict: b"):
        load({"a": KINDS["block"](2), "b": KINDS["block"](2)}, checkpoint_id=tmp_path / "c")


@pytest.mark.usefixtures("allowed")
def test_archives_hold_nothing_but_the_tensor() -> None:
    whole, part = archive_wrapper("w", KINDS["block"](1)), archive_wrapper("w", of_view(1))
    assert len(part.getvalue()) == len(whole.getvalue())


@pytest.mark.parametrize(
    ("stored", "target"),
    [
        (values(), BlockTensor.of(values(seed=2))),
        (BlockTensor.of(values()), torch.zeros(8, 4)),
        (values().t().contiguous().t(), BlockTensor.of(values(seed=2))),
    ],
)
@pytest.mark.usefixtures("allowed")
def test_the_class_converts_from_and_to_plain_tensors(
    stored: torch.Tensor, target: torch.Tensor, tmp_path: Path
) -> None:
    save({"w": stored}, checkpoint_id=tmp_path / "c")
    load({"w": target}, checkpoint_id=tmp_path / "c")
    got = target.dequantize() if isinstance(target, BlockTensor) else target
    assert torch.equal(got, BlockTensor.of(values()).dequantize())


@pytest.mark.parametrize(("kind", "lacks"), [("block", "BlockOptions"), ("method", "MethodDtype")])
def test_classes_that_are_not_allowed_are_refused_when_saved_and_when_loaded(
    kind: str, lacks: str, tmp_path: Path
) -> None:
    name = type(KINDS[kind](1)).__qualname__
    with pytest.raises(UnsupportedValueError, match=rf"^'m\.w' .*{name}.*{lacks}.*add_safe_globals\(\[.*{name}"):
        save({"m": {"w": KINDS[kind](1)}}, checkpoint_id=tmp_path / "c")
    assert not list(tmp_path.glob("c/*"))
    with torch.serialization.safe_globals(WRAPPER_GLOBALS):
        save({"m": {"w": KINDS[kind](1)}}, checkpoint_id=tmp_path / "c")
    for call in (
        lambda: load({"m": {"w": KINDS[kind](2)}}, checkpoint_id=tmp_path / "c"),
        lambda: load_keys(checkpoint_id=tmp_path / "c"),
    ):
        with pytest.raises(UnsafeCheckpointError, match=rf"'m\.w'.*{lacks}.*{name}.*allow_globals=") as raised:
            call()
        assert not isinstance(raised.value, CorruptCheckpointError)
    state = {"m": {"w": KINDS[kind](2)}}
    load(state, checkpoint_id=tmp_path / "c", planner=DefaultLoadPlanner(allow_globals=WRAPPER_GLOBALS))
    assert torch.equal(state["m"]["w"].dequantize(), KINDS[kind](1).dequantize())
    found = load_keys(checkpoint_id=tmp_path / "c", allow_globals=WRAPPER_GLOBALS)
    assert torch.equal(found["m"]["w"].dequantize(), KINDS[kind](1).dequantize())


@pytest.mark.usefixtures("allowed")
def test_a_copy_that_the_class_refuses_names_key_and_classes(tmp_path: Path) -> None:
    save({"w": BlockTensor.of(values())}, checkpoint_id=tmp_path / "c")
    template = {"w": BlockTensor.of(values(), BlockOptions(8))}
    with pytest.raises(UnsupportedValueError, match=r"'w' is stored as a BlockTensor.*the block sizes differ"):
        load(template, checkpoint_id=tmp_path / "c")


class NoCopy(BlockTensor):
    """A class without `copy_`, as torchao's for GGUF."""

    def _fill(self, source: torch.Tensor) -> None:
        raise NotImplementedError("aten.copy_")


def test_equal_forms_are_copied_without_the_class(tmp_path: Path) -> None:
    with torch.serialization.safe_globals([*WRAPPER_GLOBALS, NoCopy]):
        save({"w": NoCopy.of(values())}, checkpoint_id=tmp_path / "c")
        template = {"w": NoCopy.of(values(seed=1))}
        load(template, checkpoint_id=tmp_path / "c")
        assert torch.equal(template["w"].dequantize(), NoCopy.of(values()).dequantize())
        with pytest.raises(UnsupportedValueError, match=r"'w' is stored as a NoCopy.*NotImplementedError"):
            load({"w": NoCopy.of(values(), BlockOptions(2))}, checkpoint_id=tmp_path / "c")


class Dequantizing(BlockTensor):
    """A class that converts itself to a plain tensor for operations that it does not have, as torchao's codebooks."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.copy_, torch.Tensor.__reduce_ex__):
            args = tuple(each.dequantize() if isinstance(each, cls) else each for each in args)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def test_a_class_that_would_lose_its_values_is_refused(tmp_path: Path) -> None:
    with torch.serialization.safe_globals([*WRAPPER_GLOBALS, Dequantizing]):
        with pytest.raises(UnsupportedValueError, match=r"^'w' .*Dequantizing.*pickled as a plain tensor"):
            save({"w": Dequantizing.of(values())}, checkpoint_id=tmp_path / "c")
        save({"w": values()}, checkpoint_id=tmp_path / "c")
        with pytest.raises(UnsupportedValueError, match=r"'w' is stored as a Tensor.*Dequantizing has no `copy_`"):
            load({"w": Dequantizing.of(values())}, checkpoint_id=tmp_path / "c")


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors:UserWarning")
def test_a_class_whose_detach_is_a_copy_and_whose_copy_keeps_a_part_is_filled(tmp_path: Path) -> None:
    mask = values() > 0
    saved, template = MaskedTensor(values(seed=1), mask), MaskedTensor(values(seed=2), ~mask)
    with pytest.raises(UnsupportedValueError, match=r"^'w' .*add_safe_globals\(\[MaskedTensor\]"):
        save({"w": saved}, checkpoint_id=tmp_path / "c")
    with torch.serialization.safe_globals([MaskedTensor]):
        save({"w": saved}, checkpoint_id=tmp_path / "c")
        load({"w": template}, checkpoint_id=tmp_path / "c")
    assert torch.equal(template.get_data(), saved.get_data())
    assert torch.equal(template.get_mask(), mask)


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, MethodTensor):
        return MethodTensor(tensor._data.to("meta"), tensor._scale_inv.to("meta"), tensor._kind)
    inner = {name: getattr(tensor, name).to("meta") for name in tensor.__tensor_flatten__()[0]}
    return type(tensor.detach()).__tensor_unflatten__(inner, tensor.options)


@pytest.mark.parametrize("kind", sorted({*KINDS} - {"method"}))
@pytest.mark.usefixtures("allowed")
def test_templates_on_the_meta_device_are_given_memory(kind: str, tmp_path: Path) -> None:
    save({"m": [KINDS[kind](1)]}, checkpoint_id=tmp_path / "c")
    state = {"m": [on_meta(KINDS[kind](2))], "absent": on_meta(KINDS[kind](2))}
    load(state, checkpoint_id=tmp_path / "c", planner=DefaultLoadPlanner(allow_partial_load=True))
    assert state["m"][0].device.type == "cpu"
    assert torch.equal(state["m"][0].dequantize(), KINDS[kind](1).dequantize())
    assert torch.equal(state["absent"].dequantize(), torch.zeros_like(KINDS[kind](1).dequantize()))


@pytest.mark.usefixtures("allowed")
def test_a_meta_template_that_cannot_be_given_memory_names_what_to_pass(tmp_path: Path) -> None:
    save({"m": {"w": KINDS["method"](1)}}, checkpoint_id=tmp_path / "c")
    with pytest.raises(UnsupportedValueError, match=r"'m\.w' is a MethodTensor on the meta .*empty dict.*assign=True"):
        load({"m": {"w": on_meta(KINDS["method"](2))}}, checkpoint_id=tmp_path / "c")


class Unpicklable(BlockTensor):
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("holds a handle of a device")


@pytest.mark.usefixtures("allowed")
def test_a_class_that_cannot_be_pickled_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedValueError, match=r"^'w' .*Unpicklable.*holds a handle of a device"):
        save({"w": Unpicklable.of(values())}, checkpoint_id=tmp_path / "c")
    assert not list(tmp_path.glob("c/*"))


class Failing(BlockTensor):
    """Rebuilt by a version of its library that expects other attributes."""

    def __setstate__(self, state: Any) -> None:
        raise KeyError("zero_point")


def test_a_class_that_fails_to_rebuild_is_no_damage(tmp_path: Path) -> None:
    with torch.serialization.safe_globals([*WRAPPER_GLOBALS, Failing]):
        save({"w": Failing.of(values())}, checkpoint_id=tmp_path / "c")
        with pytest.raises(UnsupportedValueError, match=r"'w' is made of .*Failing.*zero_point.*version"):
            load_keys(checkpoint_id=tmp_path / "c")


@pytest.mark.usefixtures("allowed")
def test_a_class_method_is_allowed_for_allowed_tensor_classes_alone(tmp_path: Path) -> None:
    class Holder:
        def __reduce__(self) -> Any:
            return getattr, (MethodTensor, "of")

    with pytest.warns(UserWarning, match="'x' would not load back: it is made of builtins.getattr"):
        save({"x": Holder()}, checkpoint_id=tmp_path / "c")
    with pytest.raises(UnsafeCheckpointError, match="getattr"):
        load_keys(checkpoint_id=tmp_path / "c")


def test_copies_share_no_memory() -> None:
    one = BlockTensor.of(values())
    other = clone_tensor(one)
    one.codes.zero_()
    assert torch.equal(other.dequantize(), BlockTensor.of(values()).dequantize())


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
