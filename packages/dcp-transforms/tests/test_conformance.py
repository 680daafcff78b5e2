"""This package's transforms in the suite for all transforms."""

from __future__ import annotations

from dcp_core.testing.conformance import BlockTransformConformance, StreamTransformConformance
from dcp_transforms import BlockZStandard, FloatPlanes, ZStandard


class TestZStandard(StreamTransformConformance):
    def make(self) -> ZStandard:
        return ZStandard(5)


class TestFloatPlanes(BlockTransformConformance):
    def make(self) -> FloatPlanes:
        return FloatPlanes()


class TestBlockZStandard(BlockTransformConformance):
    def make(self) -> BlockZStandard:
        return BlockZStandard(2)
