"""Which conversions keep every value, checked against the values themselves."""

import pytest
import torch

from dcp_core.tensors.kinds import is_lossless_cast

LOSSLESS = [
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.float32, torch.float64),
    (torch.float8_e4m3fn, torch.bfloat16),
    (torch.float8_e5m2, torch.float16),
    (torch.int8, torch.int64),
    (torch.uint8, torch.int16),
    (torch.int16, torch.float32),
    (torch.int32, torch.float64),
    (torch.bool, torch.int8),
    (torch.bool, torch.float16),
    (torch.float32, torch.complex64),
    (torch.complex64, torch.complex128),
]
LOSSY = [
    (torch.float32, torch.bfloat16),
    (torch.float16, torch.bfloat16),
    (torch.bfloat16, torch.float16),
    (torch.float32, torch.int64),
    (torch.int64, torch.float64),
    (torch.int32, torch.float32),
    (torch.int64, torch.int32),
    (torch.int8, torch.uint8),
    (torch.uint8, torch.int8),
    (torch.complex64, torch.float32),
    (torch.int8, torch.bool),
    (torch.float64, torch.complex64),
]


@pytest.mark.parametrize(("source", "target"), LOSSLESS)
def test_conversions_that_keep_every_value(source: torch.dtype, target: torch.dtype) -> None:
    assert is_lossless_cast(source, target)


@pytest.mark.parametrize(("source", "target"), LOSSY)
def test_conversions_that_lose_some(source: torch.dtype, target: torch.dtype) -> None:
    assert not is_lossless_cast(source, target)


@pytest.mark.parametrize("source", [torch.int8, torch.uint8, torch.int16, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("target", [torch.float16, torch.bfloat16, torch.float32, torch.int16, torch.int32])
def test_agrees_with_converting_every_value(source: torch.dtype, target: torch.dtype) -> None:
    patterns = torch.arange(2 ** (8 * source.itemsize), dtype=torch.int64)
    raw = patterns.to(torch.uint8 if source.itemsize == 1 else torch.int16)
    values = raw[torch.isfinite(raw.view(source).float())].view(source)
    back = values.to(target).to(torch.float64)
    finite = bool(torch.equal(back, values.to(torch.float64)))
    # Infinities and NaNs of the source have no place in an integer.
    assert is_lossless_cast(source, target) == (finite and (target.is_floating_point or not source.is_floating_point))
