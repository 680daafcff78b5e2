"""Frames of blocks: every compressor's come back, also with a library that lacks the parameter that makes it fast."""

from __future__ import annotations

import numpy as np
import pytest

from dcp_transforms import frames
from dcp_transforms.frames import FrameCompressor, decompress

EXPONENTS = np.random.default_rng(0).geometric(0.4, 1 << 16).astype(np.uint8).tobytes()


@pytest.mark.parametrize("data", [b"", b"a", bytes(1 << 20), EXPONENTS])
@pytest.mark.parametrize("compressor", [FrameCompressor.for_entropy(), FrameCompressor.at_level(3)])
def test_content_comes_back(compressor: FrameCompressor, data: bytes) -> None:
    frame = compressor.compress(data)
    assert decompress(memoryview(frame), len(data)) == data
    assert compressor.compress(data) == frame


def test_bytes_that_never_repeat_in_a_row_are_coded_by_how_often_they_occur() -> None:
    assert len(FrameCompressor.for_entropy().compress(EXPONENTS)) < 0.35 * len(EXPONENTS)


def test_library_without_the_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "_LITERALS", 1_000_000)
    frame = FrameCompressor.for_entropy().compress(EXPONENTS)
    assert len(frame) < 0.35 * len(EXPONENTS)
    assert decompress(memoryview(frame), len(EXPONENTS)) == EXPONENTS
