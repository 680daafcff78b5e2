"""Torch's dtypes by name, without `torch.`. A manifest has every dtype's element size, also of others.

Source: torch 2.13 `torch.dtype.itemsize` and `torch.storage._dtype_to_storage_type_map`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_BY_ITEM_BYTES: dict[int, tuple[str, ...]] = {
    1: (
        *("bool", "uint8", "int8", "qint8", "quint8", "quint4x2", "quint2x4"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
        *("uint1", "uint2", "uint3", "uint4", "uint5", "uint6", "uint7"),
        *("int1", "int2", "int3", "int4", "int5", "int6", "int7"),
        *("bits1x8", "bits2x4", "bits4x2", "bits8"),
    ),
    2: ("int16", "uint16", "float16", "bfloat16", "bits16"),
    4: ("int32", "uint32", "float32", "complex32", "qint32"),
    8: ("int64", "uint64", "float64", "complex64"),
    16: ("complex128",),
}

ITEM_BYTES: Mapping[str, int] = MappingProxyType(
    {name: item_bytes for item_bytes, names in _BY_ITEM_BYTES.items() for name in names}
)
"""Bytes per element, as torch's `itemsize`; for packed dtypes, per storage element."""

TYPED_STORAGES: Mapping[str, str] = MappingProxyType(
    {
        "float64": "DoubleStorage",
        "float32": "FloatStorage",
        "float16": "HalfStorage",
        "bfloat16": "BFloat16Storage",
        "int64": "LongStorage",
        "int32": "IntStorage",
        "int16": "ShortStorage",
        "int8": "CharStorage",
        "uint8": "ByteStorage",
        "bool": "BoolStorage",
        "complex128": "ComplexDoubleStorage",
        "complex64": "ComplexFloatStorage",
        "qint8": "QInt8Storage",
        "qint32": "QInt32Storage",
        "quint8": "QUInt8Storage",
        "quint4x2": "QUInt4x2Storage",
        "quint2x4": "QUInt2x4Storage",
    }
)
"""Torch's typed storage classes; other dtypes are pickled with `UntypedStorage`."""
