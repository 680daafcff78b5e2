"""Makes the inputs that fuzzing begins with: `python -m integration_tests.fuzz.make_corpus`."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dcp_format.safetensors.safetensors_header import build_header
from dcp_manifest.file.blob import FOOTER_BYTES
from dcp_transforms import ZStandard
from dcp_transforms.block_zstd import BlockZStandard
from dcp_transforms.float_planes import FloatPlanes

HERE = Path(__file__).parent
GOLDEN = HERE.parent / "golden"


def inputs() -> Iterator[tuple[str, str, bytes]]:
    """(target, name, bytes) of each."""
    for path in sorted([*GOLDEN.glob("format-*/*/.metadata"), *GOLDEN.glob("transforms/*/.metadata")]):
        data = path.read_bytes()
        start = int.from_bytes(data[-FOOTER_BYTES + 16 : -FOOTER_BYTES + 24], "little")
        yield "manifest", path.parent.name, data[start:-FOOTER_BYTES]
        yield "footer", path.parent.name, data[-FOOTER_BYTES:]
    for path in sorted([*GOLDEN.glob("stock/*/.metadata"), GOLDEN / "format-1.0/torch/.metadata"]):
        yield "index", path.parent.name, path.read_bytes()
    for name, value in _values().items():
        data = _saved(value)
        yield "archive", name, data
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            yield "object", name, archive.read("archive/data.pkl")
    block = (np.arange(600, dtype=np.float32) / 7).tobytes()
    for name, transform in {"planes": FloatPlanes(), "zstd": BlockZStandard()}.items():
        encoded = bytes(transform.encode_block(memoryview(block), "float32"))
        yield "blocks", name, len(block).to_bytes(3, "little") + encoded
    buffer = io.BytesIO()
    stream = ZStandard().transform_to(buffer)
    stream.write(_saved(torch.zeros(40)))
    stream.close()
    yield "stream", "archive", buffer.getvalue()
    header = build_header([("a", "float32", (2, 3)), ("b", "bfloat16", ()), ("c", "int64", (0,))], {"format": "pt"})
    yield "safetensors", "three", header + bytes(26)
    parts = {
        "DCP_SHARDING_INFO": '{"a":{"saved_offsets":[2,0]}}',
        "DCP_GLOBAL_SHAPES": '{"a":[4,3]}',
        "DCP_ALIASES": '{"b":"a"}',
    }
    yield "folder", "part", build_header([("a", "float32", (2, 3))], parts) + bytes(24)
    index = b'\0INDEX\0{"metadata":{"total_size":26},"weight_map":{"a":"model.safetensors"}}'
    yield "folder", "indexed", header + bytes(26) + index
    yield "calls", "rebuild", bytes([2, 0, 3]) + bytes(range(64))


def _values() -> dict[str, Any]:
    return {
        "tensor": torch.arange(6.0).view(2, 3),
        "numbers": {"step": 7, "lr": 0.5, "text": "ß", "list": [1, (2, None)], "set": {1, 2}},
        "numpy": {"array": np.arange(3), "scalar": np.float32(2), "state": np.random.RandomState(1).get_state()},
    }


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


if __name__ == "__main__":
    for target, name, data in inputs():
        place = HERE / "corpus" / target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
