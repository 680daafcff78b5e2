"""Hugging Face folders: names of files, index, and contents by the headers alone: a tensor is a chunk of a file."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dcp_base.schemes import file_path
from dcp_core.errors import CheckpointNotFoundError, CorruptCheckpointError
from dcp_format.safetensors.complete_set import SUFFIX, chosen_set, headers_of, is_writers_name, one_save
from dcp_format.safetensors.safetensors_header import Header, HeaderEntry
from dcp_io import LocalStore, Store
from dcp_manifest import CheckpointIndex, StoredItem
from dcp_manifest.index.columns import Framing
from dcp_manifest.index.schema import check_index
from dcp_manifest.index.stored_items import StoredItems
from dcp_manifest.index.stored_tensors import TensorForm, tensor_columns

INDEX_NAME = "model.safetensors.index.json"
SHARDING = "DCP_SHARDING_INFO"
"""Metadata key: JSON, tensor name → {"saved_offsets": […]}, as torch's writer stores it."""
SHAPES = "DCP_GLOBAL_SHAPES"
"""Metadata key: JSON, tensor name → sizes of the whole tensor, which reveal a missing file."""
ALIASES = "DCP_ALIASES"
"""Metadata key: JSON, alias → name of its tensor. An alias with other bytes than the tensor is ignored."""
STORED_ONCE = "DCP_STORED_ONCE"
"""Metadata key: JSON, alias → name of its tensor, which alone has bytes in the file."""
_COMPARED_BYTES = 4 << 20
_SHARD = re.compile(r"shard-(\d{5})-model-(\d{5})-of-(\d{5})")
Box = tuple[HeaderEntry, str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Folder:
    """An opened safetensors file or folder."""

    store: Store
    index: CheckpointIndex
    files: tuple[str, ...]
    save_id: str | None
    """None if the files have no save id."""


def shard_name(number: int, count: int) -> str:
    """Return the name that Hugging Face libraries expect for one of several files; numbers begin at 1."""
    return f"model-{number:05d}-of-{count:05d}{SUFFIX}"


def shard_names(count: int) -> list[str]:
    """Return the names that Hugging Face libraries expect for `count` files."""
    return [f"model{SUFFIX}"] if count == 1 else [shard_name(number, count) for number in range(1, count + 1)]


def index_json(files: Mapping[str, Iterable[tuple[str, int]]]) -> bytes:
    """Return the index of a Hugging Face folder."""
    weight_map = {name: file for file, tensors in files.items() for name, _ in tensors}
    total = sum(size for tensors in files.values() for _, size in tensors)
    table = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return json.dumps(table, indent=2, ensure_ascii=False).encode() + b"\n"


def earlier_files(folder: Path) -> set[str]:
    """Return the names of an earlier save's files: listed in the folder's index, or named as libraries name them.

    A save must not remove other files, such as an adapter's (LoRA).
    """
    try:
        named = {*(read_weight_map(folder) or {}).values()}
    except CorruptCheckpointError:
        named = set()
    present = {path.name for path in folder.glob(f"*{SUFFIX}")}
    return {name for name in present if name in named or is_writers_name(name)}


def open_safetensors(path: str | os.PathLike[str], *, ties: bool = True) -> Folder:
    """Open a safetensors file, or all safetensors files of a folder.

    Raises CheckpointNotFoundError, or CorruptCheckpointError if a header is damaged, files contradict each other, or a
    region of a tensor is in no file.
    """
    place, index = Path(file_path(path)), INDEX_NAME
    weight_map: Mapping[str, str] | None = None
    if place.name.endswith(".index.json") and not place.is_dir():
        place, index = place.parent, place.name
        if not (place / index).exists():
            raise CheckpointNotFoundError(f"there is no index {place / index}: check the path")
    if place.is_file():
        folder, names = place.parent, [place.name]
    else:
        folder = place
        weight_map = read_weight_map(folder, index)
        names = _names(folder, weight_map, index)
    store = LocalStore(folder)
    headers = headers_of(store, names)
    if weight_map is None and place == folder:  # one file may be read without the others of its set
        headers = chosen_set(headers, str(folder))
        _check_numbers(folder, sorted(headers))
    save_id = one_save(headers, str(folder))
    try:
        boxes = _boxes(headers, weight_map, str(folder))
        _check_named(weight_map or {}, boxes, index)
        aliases = _stored_once(headers, boxes) | (_ties(store, headers, boxes) if ties else {})
        found = _index(boxes, _shapes(headers, boxes), aliases)
        check_index(found)
    except (ValueError, TypeError, OverflowError, AttributeError) as error:
        if isinstance(error, CorruptCheckpointError):
            raise
        raise CorruptCheckpointError(f"the files in {folder} contradict each other: {error}") from error
    return Folder(store, found, tuple(headers), save_id)


def read_weight_map(folder: Path, index: str = INDEX_NAME) -> dict[str, str] | None:
    """Read the weight map (tensor → file) from a folder's index; None if no index exists."""
    path = folder / index
    if path.exists() and not path.is_file():  # reading from a pipe would wait for a writer
        raise CorruptCheckpointError("the index is no file", file=str(path))
    try:
        weight_map = json.loads(path.read_text("utf-8"))["weight_map"]
        damaged = not all(isinstance(file, str) and "/" not in file for file in weight_map.values())
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(f"the index is damaged: {error!r}", file=str(path)) from error
    if damaged:
        raise CorruptCheckpointError("the index names a file by what is no plain name", file=str(path))
    found: dict[str, str] = weight_map
    return found


def _names(folder: Path, weight_map: Mapping[str, str] | None, index: str) -> list[str]:
    present = sorted(path.name for path in folder.glob(f"*{SUFFIX}")) if folder.is_dir() else []
    if weight_map is not None:
        wanted = sorted(set(weight_map.values()))
        missing = [name for name in wanted if not (folder / name).is_file()]
        if missing:
            raise CheckpointNotFoundError(
                f"{folder / missing[0]} is missing ({len(missing)} of the {len(wanted)} files that {index} names "
                "are): restore it from a copy, or download it again"
            )
        return wanted
    if not present:
        how = "check the path"
        if any(folder.glob("*pytorch_model*.bin")):
            how = "it has weights that torch.save wrote; convert them: dcp.convert(FOLDER, 'model.safetensors')"
        raise CheckpointNotFoundError(f"there is no {SUFFIX} file at {folder}: {how}")
    return present


def _check_numbers(folder: Path, names: Sequence[str]) -> None:
    """Check the numbers of per-rank files: a gap is a lost file."""
    ranks = sorted({int(found[1]) for name in names if (found := _SHARD.match(name))})
    if ranks and ranks != list(range(1, len(ranks) + 1)):
        lost = sorted(set(range(1, ranks[-1])) - set(ranks))
        raise CheckpointNotFoundError(
            f"the files of shard {', '.join(map(str, lost))} are missing in {folder}: restore them from a copy"
        )


def _table(header: Header, key: str, file: str) -> dict[str, Any]:
    try:
        table = json.loads(header.metadata.get(key, "{}"))
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"the metadata {key} is damaged: {error}", file=file) from error
    if not isinstance(table, dict):
        raise CorruptCheckpointError(f"the metadata {key} is damaged: it is no object", file=file)
    return table


def _boxes(headers: Mapping[str, Header], weight_map: Mapping[str, str] | None, folder: str) -> dict[str, list[Box]]:
    boxes: dict[str, list[Box]] = {}
    for file, header in headers.items():
        sharding = _table(header, SHARDING, file)
        for entry in header.entries:
            if weight_map is not None and weight_map.get(entry.name) != file:
                continue
            saved = sharding.get(entry.name, {}).get("saved_offsets")
            if saved is None and entry.name in boxes:
                other = boxes[entry.name][0][1]
                raise CorruptCheckpointError(
                    f"the tensor is in two files, {other} and {file}, of {folder}: remove the one that does not belong",
                    key=entry.name,
                )
            offsets = tuple(saved) if saved is not None else (0,) * len(entry.shape)
            if len(offsets) != len(entry.shape) or not all(type(at) is int and at >= 0 for at in offsets):
                raise CorruptCheckpointError("the saved offsets do not fit the tensor", file=file, key=entry.name)
            others = boxes.setdefault(entry.name, [])
            if others and others[0][0].dtype != entry.dtype:
                raise CorruptCheckpointError("its parts have different dtypes", file=file, key=entry.name)
            others.append((entry, file, offsets))
    return boxes


def _check_named(weight_map: Mapping[str, str], boxes: Mapping[str, list[Box]], index: str) -> None:
    lacking = sorted(weight_map.keys() - boxes.keys())
    if lacking:
        raise CorruptCheckpointError(
            f"{index} names tensors that are not in their files: {len(lacking)}, such as {lacking[0]!r}",
            file=weight_map[lacking[0]],
            key=lacking[0],
        )


def _shapes(headers: Mapping[str, Header], boxes: Mapping[str, list[Box]]) -> dict[str, tuple[int, ...]]:
    """Return the sizes of whole tensors: as recorded, or the extent of their boxes."""
    recorded: dict[str, tuple[int, ...]] = {}
    for file, header in headers.items():
        for name, shape in _table(header, SHAPES, file).items():
            recorded[name] = tuple(shape)
    shapes = {}
    for name, parts in boxes.items():
        ends = [tuple(at + size for at, size in zip(offsets, entry.shape, strict=True)) for entry, _, offsets in parts]
        shapes[name] = recorded.get(name) or tuple(max(sizes) for sizes in zip(*ends, strict=True))
    return shapes


def _ties(store: Store, headers: Mapping[str, Header], boxes: Mapping[str, list[Box]]) -> dict[str, str]:
    """Return alias → tensor. Bytes are compared: a program without support for aliases may have changed one of them."""
    said = _said(headers, ALIASES)
    return {
        name: target
        for name, target in said.items()
        if name in boxes and target in boxes and target not in said and _same_values(store, boxes[name], boxes[target])
    }


def _stored_once(headers: Mapping[str, Header], boxes: Mapping[str, list[Box]]) -> dict[str, str]:
    said = _said(headers, STORED_ONCE)
    return {name: target for name, target in said.items() if name not in boxes and target in boxes}


def _said(headers: Mapping[str, Header], key: str) -> dict[str, str]:
    return {name: str(target) for file, header in headers.items() for name, target in _table(header, key, file).items()}


def _same_values(store: Store, one: list[Box], other: list[Box]) -> bool:
    forms = [[(entry.dtype, entry.shape, offsets) for entry, _, offsets in boxes] for boxes in (one, other)]
    return forms[0] == forms[1] and all(
        mine == its
        for pair in zip(one, other, strict=True)
        for mine, its in zip(*(_pieces(store, box) for box in pair), strict=True)
    )


def _pieces(store: Store, box: Box) -> Iterator[bytearray]:
    entry, file, _ = box
    with contextlib.closing(store.open(file)) as source:
        for at in range(entry.start, entry.stop, _COMPARED_BYTES):
            piece = bytearray(min(_COMPARED_BYTES, entry.stop - at))
            source.read_into(at, [memoryview(piece)])
            yield piece


def _index(
    boxes: Mapping[str, list[Box]], shapes: Mapping[str, tuple[int, ...]], aliases: Mapping[str, str]
) -> CheckpointIndex:
    # An alias has its bytes a second time, for readers that know of no aliases: ours need them once.
    forms = [
        TensorForm(name, parts[0][0].dtype, shapes[name], [(offsets, entry.shape) for entry, _, offsets in parts])
        for name, parts in boxes.items()
        if name not in aliases
    ]
    rows = {form.name: row for row, form in enumerate(forms)}
    stored = StoredItems.of(
        StoredItem(file, entry.start, entry.stop - entry.start, 0, entry.stop - entry.start, Framing.RAW)
        for name in rows
        for entry, file, _ in boxes[name]
    )
    return replace(
        tensor_columns(forms),
        files=stored.files,
        chunk_items=stored.columns,
        object_items=StoredItems.of([]).columns,
        alias_names=list(aliases),
        alias_targets=np.array([rows[target] for target in aliases.values()], np.uint32),
    )
