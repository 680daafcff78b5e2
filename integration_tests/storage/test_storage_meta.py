"""What storages say of themselves (`StorageMeta`): writers from construction on, readers of what they have read.

The checkpoint id is the one that the caller gave, as it was given, whatever was stored, and wherever it has moved.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint import _fsspec_filesystem as stock_fsspec
from torch.distributed.checkpoint import hf_storage as stock_hf

import dcp_all as dcp
from dcp_all import format_utils, hf_storage, quantized_hf_storage
from dcp_bridge import from_stock, to_stock

STATE = {"w": torch.arange(4.0)}


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of storage: `id_of` gives the id for a folder, `save` saves there, `reader` reads."""

    reader: Callable[[Any], Any]
    save: Callable[[Any], Any] = lambda place: dcp.save(STATE, checkpoint_id=place)
    id_of: Callable[[str], Any] = str
    of_stock: bool = False
    """Whether the reader is one of stock's, which makes a `Path` of the id."""
    as_saved: bool = False
    """Whether the id stays the one of the save, which stock's file format names."""


def _save_stock(place: Any) -> None:
    stock.save(STATE, storage_writer=stock.FileSystemWriter(place), no_dist=True)


def _save_hf(place: Any) -> None:
    dcp.save(STATE, storage_writer=hf_storage.HuggingFaceStorageWriter(place))


def _stocks_reader(place: Any) -> Any:
    return from_stock(stock.FileSystemReader(place))


def _in_memory(folder: str) -> str:
    return f"memory:/{folder}"


CASES = {
    "folder": Case(dcp.FileSystemReader),
    "folder, Path": Case(dcp.FileSystemReader, id_of=Path),
    "folder, relative": Case(dcp.FileSystemReader, id_of=os.path.relpath),
    "folder, URI": Case(dcp.FileSystemReader, id_of=lambda folder: f"file://{folder}"),
    "folder, by reset": Case(lambda place: _reset(dcp.FileSystemReader("elsewhere"), place)),
    "folder of stock's": Case(dcp.FileSystemReader, save=_save_stock),
    "indexes of ranks": Case(
        dcp.FileSystemReader, lambda place: dcp.save(STATE, checkpoint_id=place, use_collectives=False)
    ),
    "fsspec": Case(dcp.FsspecReader, id_of=_in_memory),
    "fsspec, folder": Case(dcp.FsspecReader),
    "safetensors": Case(hf_storage.HuggingFaceStorageReader, save=_save_hf),
    "safetensors, quantised": Case(quantized_hf_storage.QuantizedHuggingFaceStorageReader, save=_save_hf),
    "torch.save": Case(format_utils.BroadcastingTorchSaveReader, save=lambda place: torch.save(STATE, place)),
    "stock's": Case(_stocks_reader, of_stock=True),
    "stock's, of stock's": Case(_stocks_reader, _save_stock, of_stock=True, as_saved=True),
    "stock's of safetensors": Case(
        lambda place: from_stock(stock_hf.HuggingFaceStorageReader(place)), _save_hf, of_stock=True
    ),
    "for stock": Case(lambda place: to_stock(dcp.FileSystemReader(place))),
}


def _reset(reader: Any, place: Any) -> Any:
    reader.reset(place)
    return reader


@pytest.mark.parametrize("moved", [False, True], ids=["in place", "moved"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:torch.distributed is (unavailable|disabled):UserWarning")
def test_what_is_read_has_the_readers_id(name: str, moved: bool, tmp_path: Path) -> None:
    case = CASES[name]
    place = case.id_of(str(tmp_path / "first"))
    case.save(place)
    found = place
    if moved and case.id_of is not _in_memory:
        found = case.id_of(str(tmp_path / "second"))
        shutil.move(tmp_path / "first", tmp_path / "second")
    meta = case.reader(found).read_metadata().storage_meta
    assert meta is not None
    wanted = place if case.as_saved else found
    wanted = Path(wanted) if case.of_stock else wanted
    assert (meta.checkpoint_id, type(meta.checkpoint_id)) == (wanted, type(wanted))


def test_an_object_stores_reader_has_its_id(s3: Any) -> None:
    uri = f"s3://{s3.bucket}/storage-meta"
    dcp.save(STATE, storage_writer=dcp.ObjectStoreWriter(uri))
    meta = dcp.ObjectStoreReader(uri).read_metadata().storage_meta
    assert meta is not None
    assert meta.checkpoint_id == uri
    assert dcp.ObjectStoreWriter(uri).storage_meta().checkpoint_id == uri  # type: ignore[union-attr]


class AsksForTheMeta(dcp.DefaultLoadPlanner):
    """Notes what a load passes to its planner."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        self.seen = metadata.storage_meta
        super().set_up_planner(state_dict, metadata, is_coordinator)


def _ids_in_loads(folder: str, rank_local: bool) -> list[Any]:
    dcp.save({**STATE, "step": 1}, checkpoint_id=folder, use_collectives=not rank_local)
    seen = []
    for reader in (dcp.FileSystemReader(folder), stock.FileSystemReader(folder)):
        planner = AsksForTheMeta()
        dcp.load({"w": torch.zeros(4)}, storage_reader=reader, planner=planner)
        seen.append((str(planner.seen.checkpoint_id), planner.seen.load_id is not None))
    return seen


@pytest.mark.parametrize("rank_local", [False, True])
def test_planners_of_every_rank_see_it(ranks: Any, rank_local: bool, tmp_path: Path) -> None:
    assert ranks.run(2, _ids_in_loads, str(tmp_path), rank_local) == [[(str(tmp_path), True)] * 2] * 2


def _save_stocks_way_without_collectives(folder: str) -> list[Any]:
    with warnings.catch_warnings():  # the rank that comes second may find the other's file, and warns
        warnings.simplefilter("ignore")
        stock.save(STATE, checkpoint_id=folder, use_collectives=False)
    planner = AsksForTheMeta()
    dcp.load({"w": torch.zeros(4)}, storage_reader=stock.FileSystemReader(folder), planner=planner)
    return [str(planner.seen.checkpoint_id), planner.seen.save_id]


def test_indexes_of_ranks_that_stock_wrote(ranks: Any, tmp_path: Path) -> None:
    """Each has a save id of its own, which must not count as that of the checkpoint."""
    assert ranks.run(2, _save_stocks_way_without_collectives, str(tmp_path)) == [[str(tmp_path), None]] * 2


WRITERS = {
    "folder": (dcp.FileSystemWriter, stock.FileSystemWriter),
    "fsspec": (dcp.FsspecWriter, stock_fsspec.FsspecWriter),
    "safetensors": (hf_storage.HuggingFaceStorageWriter, stock_hf.HuggingFaceStorageWriter),
}


@pytest.mark.parametrize("name", WRITERS)
def test_writers_have_ids_from_construction_as_stocks(name: str, tmp_path: Path) -> None:
    for make in WRITERS[name]:
        writer = make(str(tmp_path))
        meta = writer.storage_meta()
        assert os.fspath(meta.checkpoint_id) == str(tmp_path)
        assert meta.save_id
        assert meta.save_id == writer.storage_meta().save_id
        assert meta.load_id is None
    writer = WRITERS[name][0](str(tmp_path / "saved"))
    first = writer.storage_meta().save_id  # type: ignore[union-attr]
    metadata = dcp.save(STATE, storage_writer=writer)
    assert metadata.storage_meta == writer.storage_meta()
    again = dcp.save(STATE, storage_writer=writer).storage_meta
    assert again is not None
    assert again.save_id not in (None, first)
