"""The converters of this package: checkpoint folders, torch.save files, safetensors."""

from __future__ import annotations

import os
from pathlib import Path

from dcp_format.checkpoints.checkpoint import is_checkpoint, open_checkpoint, write_checkpoint
from dcp_format.checkpoints.stored_content import stored_content
from dcp_format.content.content import Content
from dcp_format.safetensors.complete_set import SUFFIX
from dcp_format.safetensors.safetensors_index import INDEX_NAME, open_safetensors
from dcp_format.safetensors.safetensors_write import write_safetensors
from dcp_format.torch_save.torch_save_read import is_torch_save, open_torch_save
from dcp_format.torch_save.torch_save_write import write_torch_save

__all__ = ["CheckpointConverter", "SafetensorsConverter", "TorchSaveConverter"]

Place = str | os.PathLike[str]
_INDEX_SUFFIX = f"{SUFFIX}.index.json"
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


class CheckpointConverter:
    """Converter of checkpoint folders, which have an index `.metadata`."""

    fallback = True
    """True: `CheckpointConverter` is used for names that no other converter selects."""
    takes_uris = True
    """True: checkpoints at URIs are read and written in place, since every store publishes an index atomically."""

    detect, read, write = staticmethod(is_checkpoint), staticmethod(open_checkpoint), staticmethod(write_checkpoint)

    def suits(self, path: Place) -> bool:
        """Whether the name has no suffix of another format."""
        return Path(path).suffix not in (*_TORCH_SUFFIXES, SUFFIX) and not str(path).endswith((".hf", ".hf/"))


class TorchSaveConverter:
    """Converter of `torch.save` files."""

    detect, read, write = staticmethod(is_torch_save), staticmethod(open_torch_save), staticmethod(write_torch_save)

    def suits(self, path: Place) -> bool:
        """Whether the suffix is `.pt`, `.pth`, `.bin` or `.ckpt`."""
        return Path(path).suffix in _TORCH_SUFFIXES


class SafetensorsConverter:
    """Converter of safetensors files and Hugging Face folders."""

    def detect(self, path: Place) -> bool:
        """Whether the path is a safetensors file, or a folder that has such files and no checkpoint index."""
        place = Path(path)
        if place.is_dir():
            has_files = (place / INDEX_NAME).exists() or any(place.glob(f"*{SUFFIX}"))
            return has_files and not is_checkpoint(place)
        return place.is_file() and (place.name.endswith((SUFFIX, _INDEX_SUFFIX)) or _begins_as_one(place))

    def suits(self, path: Place) -> bool:
        """Whether the suffix is `.safetensors` (a file) or `.hf` (a folder)."""
        return Path(path).suffix in (SUFFIX, ".hf")

    def read(self, path: Place) -> Content:
        """Read all tensors of a safetensors file or folder as a `Content`."""
        folder = open_safetensors(path)
        return stored_content(folder.store, folder.index)

    write = staticmethod(write_safetensors)


def _begins_as_one(path: Path) -> bool:
    """Whether a file begins like safetensors: a header length that fits the file, then JSON."""
    with path.open("rb") as file:
        head = file.read(9)
    return len(head) == 9 and head[8:] == b"{" and int.from_bytes(head[:8], "little") < path.stat().st_size
