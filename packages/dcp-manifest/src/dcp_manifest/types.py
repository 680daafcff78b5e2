"""Names of types that dcp-manifest and the packages above it share: numpy arrays by dtype, and bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

Bool = npt.NDArray[np.bool_]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
Box = tuple[Sequence[int], Sequence[int]]
"""Offsets and sizes."""
Boxes = Mapping[str, Sequence[Box]]
"""Boxes of tensors, by name."""
Buffer = bytes | bytearray | memoryview
