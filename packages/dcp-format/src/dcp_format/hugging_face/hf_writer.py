"""`HuggingFaceStorageWriter`: saves into safetensors files that Hugging Face libraries open.

Source: torch 2.13 `torch.distributed.checkpoint.hf_storage.HuggingFaceStorageWriter` (parameters, names of files).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dcp_base.schemes import file_path
from dcp_core import Metadata, SavePlan, SavePlanner, WriteItem, WriteResult
from dcp_core.errors import DcpError, MissingKeyError, UnsupportedValueError
from dcp_format.content.new_file import sweep, temporary_name
from dcp_format.export.file_map import ExportedTensor
from dcp_format.export.safetensors_writer import SafetensorsWriter
from dcp_format.export.shared_files import RankPart
from dcp_format.hugging_face.hf_files import (
    Placement,
    items_by_file,
    names_of_files,
    sharded_files,
    sharding_metadata,
    write_part,
)
from dcp_format.safetensors.complete_set import Stamp, fresh_name, is_writers_name
from dcp_format.safetensors.safetensors_index import ALIASES, INDEX_NAME, earlier_files, shard_name
from dcp_format.safetensors.safetensors_write import publish_files
from dcp_io import LocalStore


class HuggingFaceStorageWriter(SafetensorsWriter):
    """Storage writer that saves tensors as safetensors files, for Hugging Face libraries.

    Files get their final names, and the index is written, after every rank has written its files. Values other than
    tensors are refused before anything is written. A tensor with several names is written under each of them.

    Args:
        path: Path of the folder; a relative one means the current working folder.
        fqn_to_index_mapping: Name of a tensor → number of its file, from 1 on; None writes one file.
        thread_count: Number of files that a rank writes at the same time.
        save_distributed: Whether each rank writes its shards of the tensors into its own files. Otherwise every
            tensor must be whole on the rank that writes it.
        enable_consolidation: Whether the ranks write their shards into files of whole tensors, each byte once; see
            `save_safetensors`.
        thread_count_consolidation: Accepted and not used.

    Ranks: every rank; the coordinator chooses the names of the files.

    Example:
        ```python
        import torch
        from dcp_core import save
        from dcp_format import HuggingFaceStorageWriter

        files = {"embedding": 1, "head": 2}
        writer = HuggingFaceStorageWriter("model", fqn_to_index_mapping=files)
        save({"embedding": torch.ones(8, 4), "head": torch.ones(4, 2)}, storage_writer=writer)
        ```
    """

    stores_aliases = False
    ids_are_paths = False
    _always_indexed = True

    def __init__(
        self,
        path: str,
        fqn_to_index_mapping: dict[str, int] | None = None,
        thread_count: int = 1,
        save_distributed: bool = False,
        enable_consolidation: bool = False,
        thread_count_consolidation: int = 1,
    ) -> None:
        if enable_consolidation and not save_distributed:
            raise ValueError("enable_consolidation makes whole files of ranks' parts: it needs save_distributed=True")
        if thread_count < 1 or thread_count_consolidation < 1:
            raise ValueError("thread_count and thread_count_consolidation must be at least 1")
        bad = sorted(name for name, number in (fqn_to_index_mapping or {}).items() if number < 1)
        if bad:
            raise ValueError(f"fqn_to_index_mapping: files are numbered from 1 on; {bad[:4]} are not")
        self.fqn_to_index_mapping = fqn_to_index_mapping
        self.thread_count = thread_count
        self.save_distributed = save_distributed
        self.enable_consolidation = enable_consolidation
        self.thread_count_consolidation = thread_count_consolidation
        super().__init__(path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save, into the folder `checkpoint_id` unless it is None."""
        super().reset(checkpoint_id)
        self._rank = 0
        self._aliases: dict[str, str] = {}
        self._temporary: dict[str, str] = {}

    @property
    def path(self) -> Path:
        """Absolute path of the folder; an assigned path takes effect at the next save."""
        return Path(file_path(self.absolute_id))

    @path.setter
    def path(self, value: str | os.PathLike[str]) -> None:
        self.checkpoint_id = value

    @property
    def fs(self) -> None:
        """None, and read-only: the files are local."""

    @property
    def metadata_path(self) -> str:
        """Path of the index file."""
        return str(self.path / INDEX_NAME)

    def _store(self) -> LocalStore:
        return LocalStore(self.path)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Store the rank. Raises DcpError for a save without a coordinator."""
        self._rank = kwargs.get("rank", 0)
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan, with tied tensors under each of their names.

        Raises UnsupportedValueError for objects, or a shard without `save_distributed`.
        """
        prepared = super().prepare_local_plan(replace(plan, aliases=None))
        for item in plan.items:
            data = item.tensor_data
            if not self.save_distributed and data is not None and data.chunk.sizes != data.size:
                raise UnsupportedValueError(
                    f"rank {self._rank} holds a part of {item.index.fqn!r} only: save with save_distributed=True (and "
                    "enable_consolidation=True for plain files), or gather whole tensors first"
                )
        self._aliases = dict(plan.aliases or {})
        if self.enable_consolidation:
            return prepared
        return replace(plan, splittable=False, aliases=None)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Remove the files of killed saves; return the plans with file names as `storage_data`.

        Raises MissingKeyError if `fqn_to_index_mapping` lacks a tensor.
        """
        if self.enable_consolidation:
            return super().prepare_global_plan(plans)
        groups: list[dict[int, list[WriteItem]]] = []
        for plan in plans:
            numbers: dict[int, list[WriteItem]] = defaultdict(list)
            for item in plan.items:
                numbers[self._number(item.index.fqn)].append(item)
            groups.append(numbers)
        highest = max((self.fqn_to_index_mapping or {"": 1}).values())
        make = sharded_files if self.save_distributed else names_of_files
        tag = self.save_id = secrets.token_hex(8)
        store = self._store()
        store.make()
        sweep(store, is_writers_name)
        folder = Path(store.path)
        taken = earlier_files(folder)
        names = [
            {number: fresh_name(name, taken, tag) for number, name in files.items()} for files in make(groups, highest)
        ]
        counts = [len(items_by_file(plan.items, own, self._number)) for plan, own in zip(plans, names, strict=True)]
        stamp = Stamp.next(folder, tag, sum(counts)).metadata
        return [replace(plan, storage_data=Placement(own, stamp)) for plan, own in zip(plans, names, strict=True)]

    def _grouped(self, tensors: Sequence[ExportedTensor]) -> tuple[Sequence[str], Sequence[Sequence[ExportedTensor]]]:
        groups: dict[int, list[ExportedTensor]] = defaultdict(list)
        for tensor in tensors:
            groups[self._number(tensor.fqn)].append(tensor)
        numbers = sorted(groups)
        return [shard_name(number, max(numbers)) for number in numbers], [groups[number] for number in numbers]

    def _number(self, fqn: str) -> int:
        if self.fqn_to_index_mapping is None:
            return 1
        if fqn not in self.fqn_to_index_mapping:
            raise MissingKeyError(f"fqn_to_index_mapping does not say which file {fqn!r} goes to")
        return self.fqn_to_index_mapping[fqn]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Write this rank's files, durably, under temporary names; returns a completed future."""
        placement = plan.storage_data
        if isinstance(placement, RankPart):
            return super().write_data(plan, planner)
        if not isinstance(placement, Placement):
            raise DcpError(f"rank {self._rank}: the plan lost its storage data; a planner's finish_plan must keep it")
        files = items_by_file(plan.items, placement.files, self._number)
        store = self._store()
        self._temporary = {name: temporary_name(name) for name in files}

        def write(names: tuple[str, str]) -> list[WriteResult]:
            items = files[names[0]]
            more = sharding_metadata(items) if self.save_distributed else self._ties_of(items)
            return write_part(store, names, items, {"format": "pt", **placement.stamp, **more}, planner)

        with ThreadPoolExecutor(self.thread_count, thread_name_prefix="dcp-hf") as pool:
            written = [*pool.map(write, self._temporary.items())]
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result([result for results in written for result in results])
        return done

    def _ties_of(self, items: list[WriteItem]) -> dict[str, str]:
        names = {item.index.fqn for item in items}
        ties = {alias: target for alias, target in self._aliases.items() if {alias, target} <= names}
        return {ALIASES: json.dumps(ties)} if ties else {}

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the save: at any moment the folder holds the old or the new complete set of files."""
        if self.enable_consolidation:
            super().finish(metadata, results)
        else:
            self._publish_parts(results)
            metadata.storage_meta = self.storage_meta()

    def _publish_parts(self, results: list[list[WriteResult]]) -> None:
        files: dict[str, list[tuple[str, int]]] = defaultdict(list)
        temporary: dict[str, str] = {}
        for rank_results in results:
            for result in rank_results:
                name, temporary_name = result.storage_data
                temporary[name] = temporary_name
                files[name].append((result.index.fqn, result.size_in_bytes))
        publish_files(self._store(), temporary, None if self.save_distributed else dict(sorted(files.items())))

    def abort(self, error: BaseException) -> None:
        """Remove the files of a failed save."""
        super().abort(error)
        store = self._store()
        for name in self._temporary.values():
            with contextlib.suppress(OSError):
                store.delete(name)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a checkpoint id is the path of a local folder."""
        return "://" not in os.fspath(checkpoint_id)
