"""Saving and loading of all kinds on real ranks, by us or by stock, in one process group each.

These functions run on the ranks; the tests look at what they return: kind → `ok`, or what went wrong.
"""

from __future__ import annotations

import importlib
import shutil
import traceback
import warnings
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from integration_tests.oracle.kinds import KINDS, Kind, same_bits

__all__ = ["Library", "Outcome", "load_all", "save_all"]

Library = Literal["ours", "stock"]
Outcome = dict[str, str]


def _kinds(saver: Library, loader: Library | None = None) -> list[Kind]:
    return [
        kind for kind in KINDS if (saver != "stock" or kind.stock_saves) and (loader != "stock" or kind.stock_loads)
    ]


def _library(name: Library) -> Any:
    return importlib.import_module("dcp_all" if name == "ours" else "torch.distributed.checkpoint")


def _attempt(action: Any) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            action()
    except Exception:  # noqa: BLE001 - the outcome of each kind is what the test looks at
        return traceback.format_exc()
    return "ok"


def save_all(folder: str, saver: Library, layout: str = "torch") -> Outcome:
    """Save each kind to a folder of its own."""
    dcp = _library(saver)

    def save(kind: Kind) -> None:
        target = Path(folder) / kind.name
        options = {"layout": layout} if saver == "ours" else {}
        if saver == "stock" and dist.get_rank() == 0:
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)  # stock's ranks all make it, which fails where a new folder is seen late
        if saver == "stock":
            dist.barrier()
        writer = dcp.FileSystemWriter(target, **options)
        dcp.save({"value": kind.make("same")}, storage_writer=writer)

    return {kind.name: _attempt(lambda kind=kind: save(kind)) for kind in _kinds(saver)}


def load_all(folder: str, saver: Library, loader: Library, sharding: str) -> Outcome:
    """Load each kind and compare every bit with what was saved."""
    dcp = _library(loader)

    def load(kind: Kind) -> None:
        wanted = kind.make(sharding)
        template = {"value": kind.blank(kind.make(sharding))}
        dcp.load(template, storage_reader=dcp.FileSystemReader(Path(folder) / kind.name))
        if not same_bits(template["value"], wanted):
            raise AssertionError(f"loaded {template['value']!r}\nwanted {wanted!r}")

    return {kind.name: _attempt(lambda kind=kind: load(kind)) for kind in _kinds(saver, loader)}
