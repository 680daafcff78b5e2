"""Finding the values in archives of `torch.save` from their ends; unusual ones are left to whoever reads all of it."""

from __future__ import annotations

import io
import pickle
import zipfile
import zlib
from typing import Any

import pytest
import torch

from dcp_core.storage.item_decoder import ArchivedTensor, ArchiveSearch, locate_tensor
from dcp_core.tensors.tensor_memory import tensor_bytes
from dcp_manifest.index.columns import Framing, StoredItem

DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.uint16, torch.float8_e4m3fn]
END = 4096


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def archive(data: bytes) -> StoredItem:
    return StoredItem("f", 1000, len(data), 0, len(data), Framing.TORCH_ZIP)


def located(data: bytes) -> ArchivedTensor | None:
    return locate_tensor(archive(data), data[:END], data[-END:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(), (7,), (300, 50), (1, 30)], ids=str)
def test_the_values_of_a_tensor_are_found(dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 100, sizes).to(dtype)
    data = saved(tensor)
    found = located(data)
    assert found is not None
    assert (found.dtype, found.sizes) == (dtype, sizes)
    item = found.item
    values = data[item.offset - 1000 : item.offset - 1000 + item.stored_bytes]
    assert values == bytes(tensor_bytes(tensor))
    assert (item.framing, item.crc32, item.running_crcs) == (Framing.RAW, zlib.crc32(values), None)


def rewritten(data: bytes, **options: Any) -> bytes:
    """The same records in another archive; `None` leaves one out."""
    out = io.BytesIO()
    changes = options.pop("changes", {})
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", **options) as new:
        for name in old.namelist():
            new.writestr(name, changes.pop(name.partition("/")[2], old.read(name)))
        for name, content in changes.items():
            new.writestr(f"archive/{name}", content)
    return out.getvalue()


VALUES = torch.arange(3000.0)


class Hostile:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return eval, ("1/0",)


UNUSUAL = {
    "transposed": saved(torch.rand(30, 50).t()),
    "view": saved(torch.rand(3000)[10:]),
    "repeated": saved(torch.rand(1).expand(500)),
    "conjugate": saved(torch.rand(500, dtype=torch.complex64).conj()),
    "parameter": saved(torch.nn.Parameter(VALUES)),
    "object": saved({"x": VALUES}),
    "number": saved(7),
    "old format": pickle.dumps(7),
    "compressed": rewritten(saved(VALUES), compression=zipfile.ZIP_DEFLATED),
    "big endian": rewritten(saved(VALUES), changes={"byteorder": b"big"}),
    "two records": rewritten(saved(VALUES), changes={"data/1": b"x"}),
    "too few values": rewritten(saved(VALUES), changes={"data/0": bytes(11_999)}),
    "hostile": rewritten(saved(VALUES), changes={"data.pkl": pickle.dumps(Hostile(), protocol=2)}),
    "not a pickle": rewritten(saved(VALUES), changes={"data.pkl": b"nonsense"}),
    "record beyond the ends": rewritten(saved(VALUES), changes={"version": bytes(END + 1)}),
    "empty": b"",
}


@pytest.mark.parametrize("case", UNUSUAL)
def test_unusual_archives_are_left_alone(case: str) -> None:
    assert located(UNUSUAL[case]) is None
    assert located(rewritten(saved(VALUES))) is not None, "the ordinary one is found"


def test_damage_never_leads_elsewhere() -> None:
    """A flipped byte may hide the values, but where they are found they are the right ones."""
    data = saved(VALUES)
    right = located(data)
    assert right is not None
    for position in [*range(END), *range(len(data) - END, len(data))]:
        damaged = bytearray(data)
        damaged[position] ^= 0x21
        found = located(bytes(damaged))
        if found is None or found == right:
            continue
        item = found.item
        values = bytes(damaged[item.offset - 1000 : item.offset - 1000 + item.stored_bytes])
        assert item.crc32 != zlib.crc32(values), f"byte {position}"


def test_only_large_bare_archives_are_searched() -> None:
    search = ArchiveSearch()
    for size, framing, crc in [
        (1000, Framing.TORCH_ZIP, None),
        (1 << 21, Framing.TORCH_ZIP, 1),
        (1 << 21, Framing.OBJECT, None),
    ]:
        search.add("k", StoredItem("f", 0, size, 0, size, framing, crc))
    assert search.requests == []


@pytest.mark.parametrize("border", [1 << 20, 4096, 100])
def test_a_search_takes_the_ends_in_any_pieces(border: int) -> None:
    tensor = torch.rand(1 << 19)
    data = saved(tensor)
    search = ArchiveSearch()
    search.add("k", archive(data))
    (request,) = search.requests
    assert request.piece is not None
    assert request.done is not None
    for position in reversed(range(0, len(data), border)):
        request.piece(position, memoryview(bytearray(data[position : position + border])))
    request.done(memoryview(b""))
    found = search.found["f", 1000].item
    assert data[found.offset - 1000 : found.offset - 1000 + found.stored_bytes] == bytes(tensor_bytes(tensor))


@pytest.mark.parametrize("what", ["key", "sizes"])
def test_what_would_never_end_is_left_alone(what: str) -> None:
    """A name of forty pairs of pairs has no text; so many large sizes have no product."""
    laughs = b"K\1q\0" + b"".join(b"h" + bytes([n]) + b"2\x86q" + bytes([n + 1]) for n in range(40))
    number = b"\x8b\0\0\1\0" + b"\1" * (1 << 16)
    sizes = b"K\4" if what == "key" else number + b"2" * 3000
    key = laughs if what == "key" else b"X\1\0\0\0000"
    pickled = b"\x80\2ctorch._utils\n_rebuild_tensor_v2\n((X\7\0\0\0storagectorch\nFloatStorage\n" + key
    pickled += b"X\3\0\0\0cpuK\4tQK\0(" + sizes + b"t(" + sizes + b"t\x89}tR."
    data = rewritten(saved(torch.ones(4)), changes={"data.pkl": pickled})
    assert locate_tensor(archive(data), data, data) is None
