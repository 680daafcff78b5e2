"""Bytes of every dtype as numpy arrays: the values that torch gives them."""

from __future__ import annotations

import numpy as np
import pytest

from dcp_inspect.reading.values import array_of, is_number
from dcp_manifest.index.dtypes import ITEM_BYTES


def test_shapes_and_packed_dtypes() -> None:
    assert array_of(np.arange(6, dtype="<i4").tobytes(), "int32", (2, 3)).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert array_of(b"\x12\xff", "float4_e2m1fn_x2").tolist() == [0x12, 0xFF]
    assert array_of(b"", "float32", (0, 5)).shape == (0, 5)
    assert array_of(bytes(8), "float64", ()) == 0
    assert all(array_of(bytes(ITEM_BYTES[dtype] * 2), dtype).shape == (2,) for dtype in ITEM_BYTES)


@pytest.mark.parametrize("dtype", [dtype for dtype in ITEM_BYTES if is_number(dtype)])
def test_values_are_those_of_torch(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    if not hasattr(torch, dtype):
        pytest.skip(f"torch {torch.__version__} has no {dtype}")
    size = ITEM_BYTES[dtype]
    bits = np.random.default_rng(0).integers(0, 256, 4096 * size, np.uint8)
    if size == 1:
        bits = np.arange(256 if dtype != "bool" else 2, dtype=np.uint8)
    elif size == 2:
        bits = np.arange(1 << 16, dtype="<u2").view(np.uint8)
    values = torch.from_numpy(bits.copy()).view(getattr(torch, dtype))
    wide = torch.complex128 if values.is_complex() else torch.float64 if values.is_floating_point() else values.dtype
    if dtype == "complex32":  # torch does not widen it in one step
        values = torch.view_as_complex(values.view(torch.float16).float().view(-1, 2))
    expected, found = values.to(wide).numpy(), array_of(bits.tobytes(), dtype)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        found = found.astype(expected.dtype)
    assert np.array_equal(found, expected, equal_nan=expected.dtype.kind in "fc")
