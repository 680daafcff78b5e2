"""What the ranks of a job do to a folder, by name, while their system calls are counted."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import dcp_all as dcp
from dcp_crash import mark
from dcp_format import WriteOptions
from integration_tests.hosts.pretended import job_on, tiers_in, without_promoter
from integration_tests.robustness import states

__all__ = ["ACTIONS", "SAVED"]

SAVED = "saved"
"""The mark of a rank that was told that its save succeeded."""
_SHARD_BYTES = 64  # several files of one small state


def _save(folder: str, version: int, state: dict[str, Any], **options: Any) -> str | None:
    saved = states.save(folder, version, state=state, **options)
    mark(SAVED)
    save_id: str | None = saved.storage_meta.save_id
    return save_id


def _save_in_background(folder: str, version: int, state: dict[str, Any], *, kind: str) -> str | None:
    del version
    with dcp.AsyncSaver(kind) as saver:
        saved = saver.save(state, storage_writer=dcp.FileSystemWriter(folder)).result()
        mark(SAVED)
    save_id: str | None = saved.storage_meta.save_id
    return save_id


def _load(folder: str, version: int, state: dict[str, Any], *, versions: list[int]) -> int:
    del version, state
    return states.version_in(folder, versions)


def _stock(folder: str, version: int, state: dict[str, Any]) -> None:
    del version
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch.distributed.checkpoint as stock

        stock.save(state, storage_writer=stock.FileSystemWriter(folder))


def _convert(folder: str, version: int, state: dict[str, Any], *, sources: Mapping[str, str], format: str) -> str:  # noqa: A002 - as in convert
    del state
    convert(sources[str(version)], folder, format)
    mark(SAVED)
    return "converted"


def convert(source: str, folder: str, format: str) -> None:  # noqa: A002 - as in convert
    """Convert a checkpoint to what `folder` holds: a `torch.save` file, or a folder of safetensors."""
    target = f"{folder}/model.pt" if format == "torch" else folder
    options = WriteOptions(
        overwrite=True, max_file_bytes=_SHARD_BYTES, objects="skip" if format == "safetensors" else "refuse"
    )
    dcp.convert(source, target, format=format, options=options)


def _export(folder: str, version: int, state: dict[str, Any], *, format: str, max_file_bytes: int) -> str:  # noqa: A002 - as in convert
    del version, format
    dcp.save_safetensors({"model": state["model"]}, folder, max_file_bytes=max_file_bytes)
    mark(SAVED)
    return "exported"


def _save_on_hosts(folder: str, version: int, state: dict[str, Any], *, step: int) -> str:
    """Save to a tier of each of two pretended hosts; `folder` has their disks."""
    del version
    hosts, tiers = ("a", "b"), tiers_in(folder)
    with job_on(folder, hosts), without_promoter(), dcp.CheckpointManager(tiers, timeout_seconds=20) as manager:
        manager.save(step, state)
        mark(SAVED)
    return "saved"


ACTIONS: dict[str, Callable[..., Any]] = {
    "save": _save,
    "background": _save_in_background,
    "load": _load,
    "stock": _stock,
    "convert": _convert,
    "export": _export,
    "save on hosts": _save_on_hosts,
}
