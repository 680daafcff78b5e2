"""`visualize`: a picture of the holders of a state dict's or a checkpoint's shards."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dcp_inspect.contents import open_index
from dcp_inspect.visuals.picture import EACH, Row, draw_holders, page
from dcp_manifest import CheckpointIndex, UnsupportedFormatError, stored_tensors
from dcp_manifest.folders.folder import rank_of_data_file
from dcp_manifest.index.dtypes import ITEM_BYTES


class Picture:
    """A picture, shown by notebooks as SVG."""

    def __init__(self, title: str, svg: str) -> None:
        self.title = title
        self.svg = svg

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the picture as a page if the name ends in `.html`, else as SVG."""
        text = page(self.title, self.svg) if os.fspath(path).endswith(".html") else self.svg
        Path(path).write_text(text, encoding="utf-8")

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"<Picture of {self.title}: notebooks show it, save(path) writes it>"


def visualize(what: Any) -> Picture:
    """Draw each tensor as a box with its shards, in the colours of the ranks that hold them.

    For DTensors and ShardedTensors, the picture has the shards of all ranks, for other tensors those of this rank.
    Similar tensors are drawn once if their names differ only in numbers.

    Args:
        what: State dict; an object with a `state_dict()`; or the path or URI of a checkpoint, in the
            colours of the ranks that wrote its chunks.

    Raises:
        CheckpointNotFoundError: The checkpoint does not exist at the path.
        UnsupportedFormatError: A state dict is to be drawn, and dcp-core is not installed.

    Ranks: one; not collective, unless the `state_dict()` is.

    Example:
        ```python
        import torch
        from dcp_inspect import visualize

        model = torch.nn.Linear(4, 2)
        visualize(model).save("model.svg")
        ```
    """
    if isinstance(what, str | os.PathLike):
        return _of_checkpoint(what)
    if not isinstance(what, Mapping):
        if not hasattr(what, "state_dict"):
            raise TypeError(f"a {type(what).__name__} has no state_dict(): pass a state dict, a model, or a path")
        what = what.state_dict()
    return _of_state_dict(what)


def _of_checkpoint(path: str | os.PathLike[str]) -> Picture:
    index = open_index(path)
    title = os.path.basename(os.fspath(path).rstrip("/"))
    return _picture(title, _rows_of_index(index), len(index.object_names), alone="not known")


def _rows_of_index(index: CheckpointIndex) -> Iterable[Row]:
    for tensor in stored_tensors(index):
        boxes: dict[Any, tuple[int, ...]] = {}
        for chunk in tensor.chunks:
            writer = rank_of_data_file(chunk.item.file)
            boxes[chunk.offsets, chunk.sizes] = () if writer is None else (writer,)
        yield Row(tensor.name, tensor.dtype, tensor.shape, ITEM_BYTES.get(tensor.dtype, 1), boxes)


def _of_state_dict(state_dict: Mapping[Any, Any]) -> Picture:
    try:
        holders = importlib.import_module("dcp_core.state_dict.holders")
    except ImportError as error:
        raise UnsupportedFormatError(f"{error}: to draw a state dict, install dcp-core") from error
    dist = importlib.import_module("torch.distributed")
    running = dist.is_available() and dist.is_initialized()
    held, objects = holders.find_holders(state_dict, dist.get_rank() if running else 0)
    world_size = dist.get_world_size() if running else 1
    title = "the state dict"
    return _picture(title, (Row(*each) for each in held), objects, alone=EACH, world_size=world_size)


def _picture(title: str, rows: Iterable[Row], objects: int, *, alone: str, world_size: int = 1) -> Picture:
    folded: dict[Any, Row] = {}
    for row in rows:
        key = (re.sub(r"\d+", "*", row.name), row.dtype, row.shape, *row.boxes.items())
        if key in folded:
            folded[key].others += 1
        else:
            folded[key] = row
    count = sum(1 + row.others for row in folded.values())
    title = f"{title}: {count:,} tensor{'' if count == 1 else 's'}, {objects:,} object{'' if objects == 1 else 's'}"
    return Picture(title, draw_holders(title, [*folded.values()], alone=alone, world_size=world_size))
