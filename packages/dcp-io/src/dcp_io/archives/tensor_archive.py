"""Archive framing around the raw bytes of a tensor, which `torch.load` can open; built without torch.

`tensor_frame` returns the bytes before and after the tensor's bytes. The archive has only the records that
readers need: `data.pkl`, `version` and `data/0`, in this order and uncompressed. Archives of other writers are read and
checked in `archive_checks`.

Source: torch 2.13 `torch.serialization._save` and `torch._utils._rebuild_tensor_v2`/`_v3` (what the pickle calls).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from dcp_io.archives.crc import crc32
from dcp_io.archives.zip_format import (
    MAX32,
    central_header,
    descriptor,
    directory_end,
    is_wide,
    local_header,
    zip64_directory_end,
)
from dcp_manifest.index.dtypes import ITEM_BYTES, TYPED_STORAGES
from dcp_manifest.pickles.opcodes import collected, global_2, integer, text_2

__all__ = ["Frame", "tensor_frame"]

_ARCHIVE = b"a"
_PAYLOAD_NAME = _ARCHIVE + b"/data/0"


@dataclass(frozen=True, slots=True)
class Frame:
    """Bytes before (prefix) and after (suffix) the raw bytes of a tensor, which make a `torch.save` archive of them."""

    prefix: bytes
    payload_bytes: int
    before_crc: bytes
    between_crcs: bytes
    after_crc: bytes

    def suffix(self, crc32: int) -> bytes:
        """Return the archive's bytes after the tensor's bytes, whose CRC32 is `crc32`."""
        crc = crc32.to_bytes(4, "little")
        return b"".join((self.before_crc, crc, self.between_crcs, crc, self.after_crc))

    @property
    def suffix_bytes(self) -> int:
        """Length of the archive's suffix in bytes, which does not depend on the CRC32."""
        return len(self.before_crc) + len(self.between_crcs) + len(self.after_crc) + 8


@functools.lru_cache(maxsize=4096)
def tensor_frame(dtype: str, sizes: tuple[int, ...], item_bytes: int | None = None) -> Frame:
    """Return the frame of a contiguous tensor; `prefix + payload + suffix(crc32(payload))` opens with `torch.load`.

    Args:
        dtype: Name of the torch dtype without `torch.`; no quantized dtype, since its tensors need their quantizer.
        sizes: Sizes of the tensor in elements; `()` for a 0-dimensional tensor.
        item_bytes: Bytes per element; None for a dtype that this package knows.

    Returns:
        The frame; `payload_bytes` is the length that the payload must have (row-major, little-endian elements).

    Raises:
        ValueError: The dtype is unknown or quantized, or a size is negative.
    """
    item_bytes = ITEM_BYTES.get(dtype, item_bytes)
    if item_bytes is None or not dtype.isidentifier() or dtype.startswith(("qint", "quint")):
        raise ValueError(f"a tensor of dtype {dtype!r} cannot be framed; store it as a torch.save archive")
    if any(size < 0 for size in sizes):
        raise ValueError(f"sizes {sizes} of a tensor cannot be negative")
    payload_bytes = math.prod(sizes) * item_bytes
    prefix = bytearray()
    directory = bytearray()
    for name, data in ((b"/data.pkl", _pickle(dtype, sizes, item_bytes)), (b"/version", b"3\n")):
        crc = crc32(data)
        directory += central_header(_ARCHIVE + name, len(data), crc, len(prefix), described=False)
        prefix += local_header(_ARCHIVE + name, len(data), crc=crc) + data
    start = len(prefix)
    prefix += local_header(_PAYLOAD_NAME, payload_bytes, says_size=False)
    behind = descriptor(payload_bytes, 0)
    directory_start = len(prefix) + payload_bytes + len(behind)
    cut = len(directory) + 16  # the CRC's place in the last entry
    directory += central_header(_PAYLOAD_NAME, payload_bytes, 0, start)
    end = directory_end(directory_start, len(directory), 3)
    if is_wide(payload_bytes):
        wide = zip64_directory_end(directory_start, len(directory), 3)
        end = wide + directory_end(MAX32, len(directory), 3)
    return Frame(
        bytes(prefix),
        payload_bytes,
        behind[:4],
        behind[8:] + bytes(directory[:cut]),
        bytes(directory[cut + 4 :]) + end,
    )


def _pickle(dtype: str, sizes: Sequence[int], item_bytes: int) -> bytes:
    """Return `data.pkl`: a call that rebuilds the tensor from the record `data/0`, as protocol-2 opcodes."""
    storage = TYPED_STORAGES.get(dtype)
    function, module, count = "_rebuild_tensor_v2", "torch", math.prod(sizes)
    tail = b""
    if storage is None:
        function, module, storage = "_rebuild_tensor_v3", "torch.storage", "UntypedStorage"
        count *= item_bytes
        tail = global_2("torch", dtype)
    place = [text_2("storage"), global_2(module, storage), text_2("0"), text_2("cpu"), integer(count)]
    strides: list[int] = []
    step = 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    numbers = (collected([*map(integer, each)]) for each in (sizes, strides[::-1]))
    arguments = [collected(place) + b"Q", integer(0), *numbers]
    arguments += [b"\x89", global_2("collections", "OrderedDict") + b")R", tail]
    return b"\x80\x02" + global_2("torch._utils", function) + b"(" + b"".join(arguments) + b"tR."
