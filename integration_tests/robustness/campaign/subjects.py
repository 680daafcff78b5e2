"""The checkpoints that are damaged: every layout of ours, what stock writes, other formats, and the golden files.

Each is a folder, saved in two versions that share no value, and a way to load it that gives all of its values.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import dcp_all as dcp
from dcp_core.objects.object_bytes import load_object
from dcp_format import HuggingFaceStorageReader, HuggingFaceStorageWriter
from dcp_format.conversion import open_content
from dcp_transforms import ZStandard
from integration_tests.robustness import states

if TYPE_CHECKING:
    from dcp_ranks.testing.ranks import RankPool

__all__ = ["NAMES", "NEW", "OLD", "Subject", "make_all", "open_subject"]

OLD, NEW = 1, 2
_GOLDEN = Path(__file__).resolve().parents[2] / "golden"
# What no checksum covers, so that damage to it may load as another sound value: see docs/security.md.
_STOCK_INDEX = frozenset({".metadata"})


@dataclass(frozen=True)
class Subject:
    """One kind of checkpoint."""

    name: str
    folder: Path
    earlier: Path | None
    load: Callable[[Path], Any]
    """Gives the values that a folder holds, in a form that two loads can be compared by."""
    unprotected: Callable[[str, str], bool]
    """Whether what is done (kind, file) may go unnoticed, as the format has nothing to notice it by."""
    verified: bool
    """Whether `dcp verify` must see every change."""


# Ours: options of the writer, and whether two ranks save.
_OURS: Mapping[str, tuple[dict[str, Any], int]] = {
    "torch": ({"layout": "torch"}, 2),
    "raw": ({"layout": "raw"}, 2),
    "raw, own index": ({"layout": "raw", "interop": False}, 2),
    "rank-local": ({"use_collectives": False}, 2),
    "a file per item": ({"single_file_per_rank": False, "thread_count": 2}, 1),
    "blocks of planes": ({"compression": "planes", "layout": "raw"}, 1),
    "blocks of zstd": ({"compression": "block.zstd/1", "layout": "raw"}, 1),
    "stream of zstd": ({"_extensions": True}, 1),
}
_GOLDEN_OURS = ("format-1.0/torch", "format-1.0/raw", "format-1.0/rank-local", *(
    f"transforms/{name}" for name in ("block.planes-1", "block.zstd-1", "stream.zstd-1")
))  # fmt: skip
_GOLDEN_STOCK = tuple(f"stock/torch-{version}" for version in ("2.3.0", "2.13.0", "2.15.0"))
_FORMATS = ("stock", "stock, compressed", "stock, converted", "safetensors", "torch.save")
NAMES = (*_OURS, *_FORMATS, *_GOLDEN_OURS, *_GOLDEN_STOCK)


def larger(version: int) -> dict[str, Any]:
    """As `states.values`, with tensors that are worth compressing and that have several blocks."""
    maker = torch.Generator().manual_seed(100 + version)
    tensors = {
        "half": (torch.randn(90, 700, generator=maker) * 0.02).bfloat16(),
        "single": (torch.randn(400, 300, generator=maker) * 0.02),
        "count": torch.arange(3000) * version,
    }
    return {**states.values(version), **tensors}


def make_all(root: Path, ranks: RankPool) -> None:
    """Save every kind in both versions under a folder."""
    for version in (OLD, NEW):
        for name, (options, world_size) in _OURS.items():
            folder = str(_place(root, name, version))
            if world_size > 1:
                ranks.run(world_size, _save_sharded, folder, version, options)
            else:
                options = {**options, "_extensions": [ZStandard()]} if "_extensions" in options else options
                states.save(folder, version, state=larger(version), no_dist=True, **options)
        ranks.run(2, _stock_sharded, str(_place(root, "stock", version)), version)
        _stock(_place(root, "stock, compressed", version), larger(version))
        place = _place(root, "torch.save", version)
        place.mkdir(parents=True)
        torch.save(_with_views(version), place / "state.pt")
        writer = HuggingFaceStorageWriter(_place(root, "safetensors", version))
        dcp.save(_tensors(version), storage_writer=writer, no_dist=True)


def open_subject(root: Path, name: str) -> Subject:
    """One of `NAMES`, as `make_all` left it."""
    if name in _GOLDEN_OURS or name in _GOLDEN_STOCK:
        ours, folder = name in _GOLDEN_OURS, _GOLDEN / name
        unprotected = _nothing if ours else functools.partial(_of_stock, _STOCK_INDEX)
        return Subject(name, folder, None, _load_keys, unprotected, verified=ours)
    kept = "stock" if name == "stock, converted" else name
    folder, earlier = _place(root, kept, NEW), _place(root, kept, OLD)
    load: Callable[[Path], Any]
    if name in _OURS:
        state = larger if _OURS[name][1] == 1 else states.values
        return Subject(name, folder, earlier, _into(state(NEW)), _nothing, verified=True)
    if name in ("stock", "stock, compressed"):
        load = _into(states.values(NEW) if name == "stock" else larger(NEW))
        return Subject(name, folder, earlier, load, functools.partial(_of_stock, _STOCK_INDEX), verified=False)
    if name == "stock, converted":
        return Subject(name, folder, earlier, _content, functools.partial(_of_stock, _STOCK_INDEX), verified=False)
    if name == "torch.save":
        return Subject(name, folder, None, lambda path: _content(path / "state.pt"), _nothing, verified=False)
    return Subject(name, folder, earlier, _safetensors, _everything, verified=False)


def _place(root: Path, name: str, version: int) -> Path:
    return root / f"{name.replace(', ', '-').replace(' ', '-')}-{version}"


def _nothing(what: str, file: str) -> bool:
    return False


def _everything(what: str, file: str) -> bool:
    """Safetensors files have no checksums: that they are as long as they say is all that can be seen."""
    return True


def _of_stock(index: frozenset[str], what: str, file: str) -> bool:
    """Stock's index has no checksum, and nothing in it says which save a data file is of."""
    return file in index or what in ("stale file", "swap files")


def _save_sharded(folder: str, version: int, options: dict[str, Any]) -> None:
    states.save(folder, version, **options)


def _stock_sharded(folder: str, version: int) -> None:
    _stock(Path(folder), states.sharded(version), no_dist=False)


def _stock(folder: Path, state: dict[str, Any], *, no_dist: bool = True) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch.distributed.checkpoint as stock
        from torch.distributed.checkpoint import _extension

        extensions = [_extension.ZStandard()] if no_dist else None
        writer = stock.FileSystemWriter(folder, _extensions=extensions)
        stock.save(state, storage_writer=writer, no_dist=no_dist)


def _tensors(version: int) -> dict[str, torch.Tensor]:
    values = states.values(version)["model"]
    return {f"model.{key}": value for key, value in values.items()}


def _with_views(version: int) -> dict[str, Any]:
    values = states.values(version)
    base = torch.arange(40.0) + version
    return {**values, "part": base[5:20], "turned": base.view(5, 8).t(), "inside": (base[1:3].clone(), "text")}


def _blank(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _blank(each) for key, each in value.items()}
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None


def _into(wanted: dict[str, Any]) -> Callable[[Path], Any]:
    """A load into a template, as trainers do it."""

    def load(folder: Path) -> Any:
        template = _blank(wanted)
        dcp.load(template, storage_reader=dcp.FileSystemReader(folder, thread_count=1), no_dist=True)
        return template

    return load


def _load_keys(folder: Path) -> Any:
    return dcp.load_keys(storage_reader=dcp.FileSystemReader(folder, thread_count=1), no_dist=True)


def _content(path: Path) -> Any:
    """All bytes that a conversion would take."""
    content = open_content(path)
    try:
        tensors = {
            name: (entry.dtype, entry.shape, b"".join(map(bytes, entry.data.pieces(1 << 20))))
            for name, entry in content.tensors.items()
        }
        objects = {name: load_object(read(), key=name) for name, read in content.objects.items()}
        return tensors, objects, content.aliases
    finally:
        content.close()


def _safetensors(folder: Path) -> Any:
    template = {name: torch.zeros_like(value) for name, value in _tensors(NEW).items()}
    dcp.load(template, storage_reader=HuggingFaceStorageReader(folder), no_dist=True)
    return template
