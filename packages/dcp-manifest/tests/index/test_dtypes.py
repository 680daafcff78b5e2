from __future__ import annotations

import pytest

from dcp_manifest.index.dtypes import ITEM_BYTES, TYPED_STORAGES


def test_sizes_are_those_that_names_tell():
    for bits, name in [(8, "float8_e5m2"), (16, "bfloat16"), (32, "complex32"), (64, "int64"), (128, "complex128")]:
        assert ITEM_BYTES[name] == bits // 8
    assert set(TYPED_STORAGES) <= set(ITEM_BYTES)


def test_they_are_torchs():
    torch = pytest.importorskip("torch", reason="compares with torch, which this package does not need")
    known = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert {str(dtype).removeprefix("torch."): dtype.itemsize for dtype in known}.items() <= ITEM_BYTES.items()
    storages = torch.storage._dtype_to_storage_type_map()
    assert {str(dtype).removeprefix("torch."): name for dtype, name in storages.items()} == TYPED_STORAGES
