"""The converters of this package: checkpoint folders, torch.save files, safetensors."""

from __future__ import annotations

import os
from pathlib import Path

from dcp_format.checkpoints.checkpoint import is_checkpoint, open_checkpoint, write_checkpoint
from dcp_format.checkpoints.stored_content import stored_content
from dcp_format.content.content import Content
from dcp_format.converters import WriteOptions
from dcp_format.safetensors.file_sets import SUFFIX
from dcp_format.safetensors.safetensors_index import INDEX_NAME, open_safetensors
from dcp_format.safetensors.safetensors_write import write_safetensors
from dcp_format.torch_save.torch_save_read import is_torch_save, open_torch_save
from dcp_format.torch_save.torch_save_write import write_torch_save

__all__ = ["CheckpointConverter", "SafetensorsConverter", "TorchSaveConverter"]

Place = str | os.PathLike[str]
_INDEX_SUFFIX = f"{SUFFIX}.index.json"
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


class CheckpointConverter:
    """Converter of checkpoint folders, which have a `.metadata`."""

    fallback = True
    """Its names are those of no other format, which others may bring."""
    takes_uris = True
    """A store publishes its index in one step, wherever it is."""

    def detect(self, path: Place) -> bool:
        """Whether there is an index."""
        return is_checkpoint(path)

    def suits(self, path: Place) -> bool:
        """Whether the name has no suffix of another format."""
        return Path(path).suffix not in (*_TORCH_SUFFIXES, SUFFIX) and not str(path).endswith((".hf", ".hf/"))

    def read(self, path: Place) -> Content:
        """Read the newest checkpoint in the folder."""
        return open_checkpoint(path)

    def write(self, content: Content, path: Place, options: WriteOptions) -> None:
        """Write a checkpoint, published atomically."""
        write_checkpoint(
            content,
            path,
            max_inflight_bytes=options.max_inflight_bytes,
            overwrite=options.overwrite,
            layout="raw" if options.layout == "raw" else "torch",
            compression=options.compression,
            tick=options.tick,
        )


class TorchSaveConverter:
    """Converter of `torch.save` files."""

    def detect(self, path: Place) -> bool:
        """Whether the path is a file that begins like a zip archive."""
        return is_torch_save(path)

    def suits(self, path: Place) -> bool:
        """Whether the suffix is `.pt`, `.pth`, `.bin` or `.ckpt`."""
        return Path(path).suffix in _TORCH_SUFFIXES

    def read(self, path: Place) -> Content:
        """Read the state dict in the file."""
        return open_torch_save(path)

    def write(self, content: Content, path: Place, options: WriteOptions) -> None:
        """Write one file, published atomically."""
        write_torch_save(
            content,
            path,
            max_inflight_bytes=options.max_inflight_bytes,
            overwrite=options.overwrite,
            tick=options.tick,
        )


class SafetensorsConverter:
    """Converter of safetensors files and Hugging Face folders."""

    def detect(self, path: Place) -> bool:
        """Whether the path is a safetensors file, or a folder with one and without a checkpoint's index."""
        place = Path(path)
        if place.is_dir():
            has_files = (place / INDEX_NAME).exists() or any(place.glob(f"*{SUFFIX}"))
            return has_files and not is_checkpoint(place)
        return place.is_file() and (place.name.endswith((SUFFIX, _INDEX_SUFFIX)) or _begins_as_one(place))

    def suits(self, path: Place) -> bool:
        """Whether the suffix is `.safetensors` (a file) or `.hf` (a folder)."""
        return Path(path).suffix in (SUFFIX, ".hf")

    def read(self, path: Place) -> Content:
        """Read all tensors."""
        folder = open_safetensors(path)
        return stored_content(folder.store, folder.index)

    def write(self, content: Content, path: Place, options: WriteOptions) -> None:
        """Write a file, or a folder of shards with an index."""
        write_safetensors(
            content,
            path,
            shard_bytes=options.shard_bytes,
            max_inflight_bytes=options.max_inflight_bytes,
            overwrite=options.overwrite,
            objects=options.objects,
            tick=options.tick,
        )


def _begins_as_one(path: Path) -> bool:
    """Whether a file begins like safetensors: a header length that fits the file, then JSON."""
    with path.open("rb") as file:
        head = file.read(9)
    return len(head) == 9 and head[8:] == b"{" and int.from_bytes(head[:8], "little") < path.stat().st_size
