"""What the tests of this folder share: both libraries under the same few calls, and tools to damage checkpoints.

Stock is imported when it is first asked for, and its own warnings are kept out of the tests.
"""

from __future__ import annotations

import contextlib
import importlib
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import dcp_all as dcp
from integration_tests.kits.damage import data_files, flip

__all__ = [
    "data_files",
    "edit_stock_metadata",
    "find_bytes",
    "flip",
    "our_load",
    "our_save",
    "quiet",
    "stock",
    "stock_load",
    "stock_save",
]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without warnings: stock warns of every second thing that it does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def stock() -> Any:
    """`torch.distributed.checkpoint`."""
    with quiet():
        importlib.import_module("torch.distributed.checkpoint.filesystem")
        return importlib.import_module("torch.distributed.checkpoint")


def stock_save(state: Mapping[Any, Any], folder: Path | str, planner: Any = None, **options: Any) -> Any:
    """Save in this process alone, as stock does it; `options` are those of its writer."""
    writer = stock().FileSystemWriter(folder, **options)
    with quiet():
        return stock().save(dict(state), storage_writer=writer, planner=planner, no_dist=True)


def stock_load(template: dict[Any, Any], folder: Path | str, planner: Any = None) -> dict[Any, Any]:
    """Load in this process alone, as stock does it; the template."""
    with quiet():
        stock().load(template, storage_reader=stock().FileSystemReader(folder), planner=planner, no_dist=True)
    return template


def our_save(state: Mapping[Any, Any], folder: Path | str, planner: Any = None, **options: Any) -> Any:
    """Save in this process alone; `options` are those of the writer."""
    writer = dcp.FileSystemWriter(folder, **options)
    return dcp.save(dict(state), storage_writer=writer, planner=planner, no_dist=True)


def our_load(template: dict[Any, Any], folder: Path | str, planner: Any = None, **options: Any) -> dict[Any, Any]:
    """Load in this process alone; the template. `options` are those of the reader."""
    reader = dcp.FileSystemReader(folder, **options)
    dcp.load(template, storage_reader=reader, planner=planner, no_dist=True)
    return template


def find_bytes(folder: Path, wanted: bytes) -> tuple[Path, int]:
    """Where the only data file that holds these bytes has them, for the first time."""
    found = [(path, at) for path in data_files(folder) if (at := path.read_bytes().find(wanted)) >= 0]
    assert len(found) == 1, f"{wanted[:20]!r} is in {found}"
    return found[0]


def edit_stock_metadata(folder: Path, edit: Callable[[Any], None]) -> None:
    """Change what a `.metadata` that stock wrote says; the result is as stock would write it."""
    stock()
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    edit(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
