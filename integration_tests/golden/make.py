"""Makes the golden checkpoints of the current format versions: `python -m integration_tests.golden.make [folder]`.

Run it once per format version and commit what it wrote. Its output may change only together with the version: the test
runs it and compares. `make_stock` makes those of other torch versions.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from dcp_io import Layout, LocalStore, Payload, WriteRequest
from dcp_io.writing.write_engine import write_items
from dcp_manifest import CheckpointIndex, StoredItem
from dcp_manifest.file import manifest_write
from dcp_manifest.file.manifest_write import encode
from dcp_manifest.index.columns import Framing, ItemColumns, ManifestInfo, TensorFlags
from dcp_manifest.index.literal_keys import LiteralKey

HERE = Path(__file__).parent
VERSION = "format-1.0-marked"
VERSION_WITH_RUNS = "format-2.0"
VERSION_WITH_LEVELS = "format-3.0"
Box = tuple[int, ...]
SAVE_ID = "00112233aabbccdd"


def elements(dtype: str, count: int) -> bytes:
    """That many bytes, such as the dtype may have."""
    return bytes((7 * n + 1) % (2 if dtype == "bool" else 120) for n in range(count))


def request(name: str, payload: Payload) -> WriteRequest:
    return WriteRequest(name, len(payload.data), lambda: payload)


class Builder:
    """Collects values, writes their bytes into one file, and makes the index that says where they are."""

    def __init__(self, folder: Path, layout: Layout, info: ManifestInfo) -> None:
        self.folder, self.layout, self.info = folder, layout, info
        self.tensors: list[dict[str, Any]] = []
        self.objects: list[dict[str, Any]] = []
        self.chunk_requests: list[WriteRequest] = []
        self.object_requests: list[WriteRequest] = []
        self.ranks = 1
        """Ranks that write; chunk n of a tensor is of rank n modulo this."""

    def tensor(
        self,
        name: str,
        dtype: str,
        item_bytes: int,
        shape: Box,
        boxes: Sequence[tuple[Box, Box]] | None = None,
        **more: int,
    ) -> None:
        """Add a tensor whose chunks are `boxes`; one that covers it by default."""
        boxes = [((0,) * len(shape), shape)] if boxes is None else boxes
        shown = []
        for _, sizes in boxes:
            data = elements(dtype, math.prod(sizes) * item_bytes)
            shown.append(data.hex() if len(data) <= 64 else f"{len(data)} bytes")
            self.chunk_requests.append(request(name, Payload(data, Framing.RAW, dtype, sizes)))
        row = {"name": name, "owner": 0, "dtype": dtype, "flags": 0, "shape": shape, "boxes": boxes, "data": shown}
        self.tensors.append({**row, **more})

    def object(self, name: str, file: str, value: Any, *, owner: int = 0) -> None:
        """Add an object, from the archive that `torch.save` made of it (torch 2.13)."""
        self.objects.append({"name": name, "owner": owner, "value": value})
        data = (HERE / "objects" / file).read_bytes()
        self.object_requests.append(request(name, Payload(data, Framing.OBJECT)))

    def write(self) -> tuple[list[StoredItem], list[StoredItem]]:
        """Write all bytes; where the chunks and the objects are."""
        chunks = len(self.chunk_requests)
        items: dict[int, StoredItem] = {}
        for rank in range(self.ranks):
            own = [*range(rank, chunks, self.ranks)]
            written = write_items(
                LocalStore(self.folder),
                [*[self.chunk_requests[row] for row in own], *(self.object_requests if rank == 0 else [])],
                prefix=f"__{self.info.rank or rank}_",
                save_id=SAVE_ID,
                layout=self.layout,
                sync=False,
            )
            items.update(zip([*own, *range(chunks, chunks + len(self.object_requests))], written, strict=False))
        return [items[row] for row in range(chunks)], [items[row] for row in range(chunks, len(items))]

    def index(self, **more: Any) -> CheckpointIndex:
        """The index of what was added."""
        rows = self.tensors
        chunk_items, object_items = self.write()
        dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
        files = list(dict.fromkeys(item.file for item in (*chunk_items, *object_items)))
        flat = [(offsets, sizes) for row in rows for offsets, sizes in row["boxes"]]
        return CheckpointIndex(
            dtypes=tuple(dtypes),
            files=tuple(files),
            tensor_names=[row["name"] for row in rows],
            tensor_dtype=np.array([dtypes.index(row["dtype"]) for row in rows], np.uint8),
            tensor_flags=np.array([row["flags"] for row in rows], np.uint8),
            tensor_ndim=np.array([len(row["shape"]) for row in rows], np.uint8),
            tensor_owner=np.array([row["owner"] for row in rows], np.uint32),
            tensor_shape=np.array([size for row in rows for size in row["shape"]], np.int64),
            tensor_chunks=np.array([len(row["boxes"]) for row in rows], np.int64),
            chunk_offsets=np.array([number for offsets, _ in flat for number in offsets], np.int64),
            chunk_sizes=np.array([number for _, sizes in flat for number in sizes], np.int64),
            chunk_items=item_columns(chunk_items, files),
            object_names=[row["name"] for row in self.objects],
            object_owner=np.array([row["owner"] for row in self.objects], np.uint32),
            object_items=item_columns(object_items, files),
            info=self.info,
            **more,
        )

    def finish(self, name: str, index: CheckpointIndex, *, interop: bool) -> None:
        """Write the index, and beside it what a reader should find."""
        (self.folder / name).write_bytes(encode(index, interop=interop))
        expected = {
            "tensors": self.tensors,
            "objects": self.objects,
            "aliases": dict(zip(index.alias_names, index.alias_targets.tolist(), strict=True)),
            "paths": index.paths,
        }
        (self.folder / f"expected{name}.json").write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n")


def item_columns(items: list[StoredItem], files: list[str]) -> ItemColumns:
    running = [item.running_crcs for item in items if item.running_crcs is not None]
    return ItemColumns(
        file=np.array([files.index(item.file) for item in items], np.uint32),
        offset=np.array([item.offset for item in items], np.uint64),
        length=np.array([item.length for item in items], np.uint64),
        lead=np.array([item.lead for item in items], np.uint32),
        stored_bytes=np.array([item.stored_bytes for item in items], np.uint64),
        framing=np.array([item.framing for item in items], np.uint8),
        chain=np.zeros(len(items), np.uint8),
        checked=np.ones(len(items), np.uint8),
        crc32=np.array([item.crc32 for item in items], np.uint32),
        running_crcs=np.concatenate([np.zeros(0, np.uint32), *running]),
    )


def add_values(builder: Builder) -> dict[str, tuple[Any, ...]]:
    """The values of the whole checkpoints; their paths."""
    halves = [((0, 0), (2, 3)), ((2, 0), (2, 3))]
    builder.tensor("model.weight", "float32", 4, (4, 3), halves, flags=TensorFlags(requires_grad=True).to_bits())
    builder.tensor("model.käse", "bfloat16", 2, (3,))
    builder.tensor("step", "int64", 8, ())
    builder.tensor("empty", "float16", 2, (0, 5))
    builder.tensor("list.0", "complex64", 8, (1, 2, 1))
    builder.tensor("mask", "bool", 1, (9,))
    builder.tensor("scaled", "float8_e4m3fn", 1, (2, 2))
    builder.tensor("long", "uint8", 1, (65_601,))
    builder.object("epoch", "epoch.pt", 7)
    builder.object("note", "note.pt", {"lr": 0.5, "tags": ["a", "ß"]})
    return {
        "model.weight": ("model", "weight"),
        "model.käse": ("model", "käse"),
        "step": ("step",),
        "empty": ("empty",),
        "list.0": ("list", 0),
        "mask": ("mask",),
        "scaled": ("scaled",),
        "long": ("long",),
        "epoch": ("epoch",),
        "note": ("note",),
        "model.tied": ("model", "tied"),
    }


def make_whole(folder: Path, layout: Layout, *, interop: bool) -> None:
    info = ManifestInfo(SAVE_ID, 1, "golden/1", 1, None, 1_700_000_000_000_000_000, (("run", "golden"),))
    builder = Builder(folder, layout, info)
    paths = add_values(builder)
    index = builder.index(alias_names=["model.tied"], alias_targets=np.array([0], np.uint32), paths=paths)
    builder.finish(".metadata", index, interop=interop)


def make_own(folder: Path) -> None:
    """What stock has no words for: values of single ranks, integer keys, paths that are not names."""
    builder = Builder(folder, "raw", ManifestInfo(SAVE_ID, 2, "golden/1", 5))
    builder.tensor("state.5.m", "float64", 8, (2,))
    builder.tensor("rng", "uint8", 1, (16,), owner=1)
    builder.tensor("rng", "uint8", 1, (16,), owner=2, boxes=[((0,), (8,)), ((8,), (8,))])
    builder.object("loader", "epoch.pt", 7, owner=2)
    paths = {"state.5.m": ("state", LiteralKey("5"), "m"), "rng": ("rng",), "loader": ("data", "loader"), "gone": ()}
    builder.finish(".metadata", builder.index(paths=paths), interop=True)


def make_rank_local(folder: Path) -> None:
    for rank in (0, 1):
        builder = Builder(folder, "torch", ManifestInfo(SAVE_ID, 2, "golden/1", 3, rank))
        builder.tensor("shared", "int32", 4, (3,))
        builder.tensor("split", "int16", 2, (4, 2), boxes=[((2 * rank, 0), (2, 2))])
        builder.object("epoch", "epoch.pt", 7)
        name = f"__{rank}.{SAVE_ID}.metadata"
        builder.finish(
            name, builder.index(paths={"shared": ("shared",), "split": ("split",), "epoch": ("epoch",)}), interop=True
        )
        (folder / f"__{rank}.metadata").write_bytes((folder / name).read_bytes())


def make_even(folder: Path) -> None:
    """Tensors that 16 ranks cut evenly, by rows and as a grid, and one that they do not; columns are runs."""
    folder.mkdir(parents=True)
    builder = Builder(folder, "raw", ManifestInfo(SAVE_ID, 16, "golden/1"))
    builder.ranks = 16
    for number in range(8):
        rows = [((2 * rank, 0), (2, 3)) for rank in range(16)]
        builder.tensor(f"rows.{number}", "float32", 4, (32, 3), rows)
        grid = [((rank // 4 * 3, rank % 4 * 16), (3, 16)) for rank in range(16)]
        builder.tensor(f"grid.{number}", "bfloat16", 2, (12, 64), grid)
    ends = [0, *itertools.accumulate(1 + number * number % 5 for number in range(16))]
    builder.tensor("uneven", "uint8", 1, (ends[-1],), [((a,), (b - a,)) for a, b in itertools.pairwise(ends)])
    builder.object("epoch", "epoch.pt", 7)
    index = builder.index(paths={row["name"]: (row["name"],) for row in (*builder.tensors, *builder.objects)})
    with mock.patch.object(manifest_write, "RUNS_ABOVE_CHUNKS", 100):
        builder.finish(".metadata", index, interop=False)


def make_levels(folder: Path) -> None:
    """Tensors in many chunks, the CRCs of which are in the order of levels; one chunk has two blocks."""
    folder.mkdir(parents=True)
    builder = Builder(folder, "raw", ManifestInfo(SAVE_ID, 4, "golden/1"))
    builder.ranks = 4
    for number in range(3):
        builder.tensor(f"rows.{number}", "float32", 4, (64, 3), [((rank, 0), (1, 3)) for rank in range(64)])
    grid = [((rank // 8, rank % 8 * 2), (1, 2)) for rank in range(64)]
    builder.tensor("grid", "bfloat16", 2, (8, 16), grid)
    ends = [0, 65_540, *range(65_543, 65_543 + 69)]
    builder.tensor("uneven", "uint8", 1, (ends[-1],), [((a,), (b - a,)) for a, b in itertools.pairwise(ends)])
    index = builder.index(paths={row["name"]: (row["name"],) for row in builder.tensors})
    with mock.patch.object(manifest_write, "RUNS_ABOVE_CHUNKS", 100):
        builder.finish(".metadata", index, interop=False)


def make_all(folder: Path) -> None:
    """All checkpoints of format 1.0, in folders below `folder`."""
    for name in ("torch", "raw", "own", "rank-local"):
        (folder / name).mkdir(parents=True)
    make_whole(folder / "torch", "torch", interop=True)
    make_whole(folder / "raw", "raw", interop=False)
    make_own(folder / "own")
    make_rank_local(folder / "rank-local")


if __name__ == "__main__":
    below = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    make_all(below / VERSION)
    make_even(below / VERSION_WITH_RUNS / "even")
    make_levels(below / VERSION_WITH_LEVELS / "levels")
