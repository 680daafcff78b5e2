"""Block transforms: every bit pattern comes back, sizes are bounded before they are believed, settings are found."""

from __future__ import annotations

import contextlib
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_core import plugins
from dcp_core.block_transforms import BlockChain, BlockTransformExtension, BlockUndo, block_bytes
from dcp_core.transforms import ExtensionRegistry
from dcp_transforms import BlockZStandard, FloatPlanes

ITEM_BYTES = {
    "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16, "complex32": 4,
    "int8": 1, "uint8": 1, "bool": 1, "int16": 2, "int32": 4, "int64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "a_dtype_to_come": 3,
}  # fmt: skip
TRANSFORMS = [FloatPlanes(), BlockZStandard(), BlockZStandard(-5)]


def round_trip(transform: BlockTransformExtension, data: bytes, dtype: str) -> int:
    encoded = memoryview(transform.encode_block(memoryview(data), dtype))
    assert transform.decoded_bytes(encoded) == len(data)
    into = bytearray(len(data))
    type(transform)().decode_block(encoded, memoryview(into))
    assert into == data
    return len(encoded)


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from(TRANSFORMS), st.sampled_from(sorted(ITEM_BYTES)), st.booleans())
def test_every_bit_pattern_comes_back(
    data: st.DataObject, transform: BlockTransformExtension, dtype: str, sampled: bool
) -> None:
    count = data.draw(st.integers(0, 400))
    item = ITEM_BYTES[dtype]
    block = data.draw(st.binary(min_size=count * item, max_size=count * item) | st.just(bytes(count * item)))
    block *= data.draw(st.sampled_from([1, 40]))
    if sampled and block:
        transform, _ = transform.for_item(memoryview(block[: item * 10]), dtype)
    round_trip(transform, block, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_special_values_come_back(dtype: str) -> None:
    bits = 8 * ITEM_BYTES[dtype]
    words = [0, 1, 1 << bits - 1, (1 << bits) - 1, (1 << bits - 1) - 1, 0x7F << bits - 9, 0xFFC << bits - 12]
    data = np.array(words * 100, f"<u{bits // 8}").tobytes()
    round_trip(FloatPlanes(), data, dtype)


@pytest.mark.parametrize(
    ("dtype", "most"), [("bfloat16", 0.67), ("float32", 0.85), ("float16", 0.9), ("float64", 0.93)]
)
def test_weights_become_smaller(dtype: str, most: float) -> None:
    values = np.random.default_rng(0).normal(0, 0.02, 100_000)
    if dtype == "bfloat16":
        data = (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    else:
        data = values.astype(dtype).tobytes()
    planes, share = FloatPlanes().for_item(memoryview(data[: 16 << 10]), dtype)
    size = round_trip(planes, data, dtype)
    assert size < most * len(data)
    assert size == pytest.approx(share * len(data), rel=0.03)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_sign_that_never_changes_costs_nothing(dtype: str) -> None:
    data = np.square(np.random.default_rng(0).normal(0, 0.02, 100_000)).astype(dtype).tobytes()
    planes, share = FloatPlanes().for_item(memoryview(data[: 16 << 10]), dtype)
    size = round_trip(planes, data, dtype)
    assert size == pytest.approx(share * len(data), rel=0.03)
    assert round_trip(FloatPlanes(), data, dtype) - size > 0.95 * 100_000 / 8


def test_small_integers_become_smaller() -> None:
    data = np.random.default_rng(0).integers(0, 1000, 50_000).astype("<i8").tobytes()
    assert round_trip(FloatPlanes(), data, "int64") < 0.25 * len(data)


def test_noise_costs_a_header() -> None:
    data = np.random.default_rng(0).bytes(1 << 17)
    assert round_trip(FloatPlanes(), data, "bfloat16") == len(data) + 13
    assert round_trip(FloatPlanes(), data, "float64") == len(data) + 21


def planes_block(layout: int, size: int, lengths: list[int], body: bytes) -> memoryview:
    return memoryview(struct.pack(f"<BI{len(lengths)}I", layout, size, *lengths) + body)


@pytest.mark.parametrize(
    ("block", "sentence"),
    [
        (memoryview(b"\x01\x00"), "cut short"),
        (memoryview(struct.pack("<BII", 2, 8, 4)), "cut short"),
        (planes_block(0x20, 8, [4, 4], bytes(8)), "layout"),
        (planes_block(0x19, 8, [4, 4], bytes(8)), "layout"),
        (planes_block(1, 9, [4, 4], bytes(8)), "do not fill"),
        (planes_block(1, 8, [4, 4], bytes(7)), "do not fill"),
        (planes_block(1, 8, [5, 3], bytes(8)), "longer than"),
    ],
)
def test_planes_that_contradict_themselves(block: memoryview, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        FloatPlanes().decoded_bytes(block)


def test_a_frame_that_lies_about_its_size_is_refused_before_anything_is_allocated() -> None:
    bomb = BlockZStandard(19).encode_block(memoryview(bytes(64 << 20)), "uint8")
    block = planes_block(0, len(bomb) + 1, [len(bomb)], bomb)
    assert FloatPlanes().decoded_bytes(block) == len(bomb) + 1
    with pytest.raises(ValueError, match="67,108,864 bytes"):
        FloatPlanes().decode_block(block, memoryview(bytearray(len(bomb) + 1)))
    with pytest.raises(ValueError, match="67,108,864 decoded bytes, not 100"):
        BlockUndo([BlockZStandard()]).decode(memoryview(bomb), memoryview(bytearray(100)))
    with pytest.raises(ValueError, match="67,108,864 intermediate bytes for 100"):
        BlockUndo([BlockZStandard(), FloatPlanes()]).decode(memoryview(bomb), memoryview(bytearray(100)))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.sampled_from([FloatPlanes(), BlockZStandard()]))
def test_any_bytes_are_decoded_or_refused(data: bytes, transform: BlockTransformExtension) -> None:
    into = memoryview(bytearray(64))
    with contextlib.suppress(Exception):  # any refusal will do; a crash or a hang would not
        BlockUndo([transform]).decode(memoryview(data), into)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 7), st.sampled_from([FloatPlanes(), BlockZStandard()]))
def test_a_flipped_bit_never_fills_more_than_asked(place: int, bit: int, transform: BlockTransformExtension) -> None:
    block = np.arange(600, dtype="<u2").tobytes()
    encoded = bytearray(transform.encode_block(memoryview(block), "bfloat16"))
    encoded[place % len(encoded)] ^= 1 << bit
    around = bytearray(b"\xaa" * (len(block) + 16))
    with contextlib.suppress(Exception):  # any refusal will do; a crash or a hang would not
        BlockUndo([transform]).decode(memoryview(encoded), memoryview(around)[8:-8])
    assert around[:8] == around[-8:] == b"\xaa" * 8


def test_a_chain_is_undone_in_the_order_of_its_descriptors() -> None:
    chain = BlockChain([BlockZStandard(), FloatPlanes()], "bfloat16", 1 << 17)
    assert chain.descriptors == ("block.zstd/1", "block.planes/1")
    data = np.random.default_rng(0).normal(0, 1, 2000).astype("<f4").tobytes()
    encoded = chain.encode(memoryview(data))
    into = memoryview(bytearray(len(data)))
    BlockUndo([BlockZStandard(), FloatPlanes()]).decode(memoryview(encoded), into)
    assert into == data
    with pytest.raises(Exception, match=r"."):
        BlockUndo([FloatPlanes(), BlockZStandard()]).decode(memoryview(encoded), into)


@pytest.mark.parametrize("transform", [FloatPlanes, BlockZStandard])
def test_they_are_found_by_their_descriptors(transform: type[BlockTransformExtension]) -> None:
    descriptor = transform().get_descriptor()
    assert descriptor == f"{transform.registry_name()}/1"
    assert plugins.transform(descriptor) is transform
    assert isinstance(ExtensionRegistry().from_descriptor_list([descriptor])[0], transform)
    assert isinstance(transform.from_descriptor("1.7"), transform)
    with pytest.raises(ValueError, match="version '2'"):
        transform.from_descriptor("2")


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="level=23"):
        BlockZStandard(23)


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [(1, 1 << 18), (16 << 20, 1 << 18), (64 << 20, 1 << 19), ((64 << 20) - 1, 1 << 18), (1 << 40, 1 << 20)],
)
def test_block_sizes(nbytes: int, expected: int) -> None:
    assert block_bytes(nbytes) == expected
