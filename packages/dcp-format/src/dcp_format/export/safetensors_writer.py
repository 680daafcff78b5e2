"""`save_safetensors` and its storage writer `SafetensorsWriter`: the ranks write the files of a model together.

Source: transformers 4 and 5, `transformers.utils` and `vocab_files_names` of the tokenizers (names of copied files).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dcp_core import (
    BlockingAsyncStager,
    Metadata,
    PeerOptions,
    SavePlan,
    SavePlanner,
    StorageMeta,
    StorageWriter,
    WriteItemType,
    WriteResult,
    save,
)
from dcp_core.arguments import absolute_id
from dcp_core.errors import CheckpointNotFoundError, DcpError, UnsupportedValueError
from dcp_core.records.protocols import CheckpointId
from dcp_core.state_dict.flatten import KeyMap
from dcp_format.content.changes import check_cast
from dcp_format.content.content import MAX_FILE_BYTES, refuse_objects
from dcp_format.content.new_file import sweep
from dcp_format.export.file_map import ExportedTensor, PlannedFile, SplitNames, lay_out, tensors_of
from dcp_format.export.shared_files import RankFacts, RankPart, agreed_aliases, check_settings, share_out
from dcp_format.export.write_files import RankLink, check_complete, create_files, publish
from dcp_format.safetensors.complete_set import Stamp, is_writers_name, split_by_size
from dcp_format.safetensors.safetensors_index import STORED_ONCE, shard_names
from dcp_format.safetensors.safetensors_write import choose_names
from dcp_io import LocalStore, Store, SupportsRanges, open_store
from dcp_ranks import Coordinator
from dcp_ranks.phases.coordinator import DEFAULT_TIMEOUT_SECONDS

_RESERVED = "DCP_"


def _strings(name: str, value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} maps strings to strings, and is a {type(value).__name__}: pass a dict")
    for pair in value.items():
        if not all(isinstance(one, str) for one in pair):
            raise TypeError(f"{name} maps strings to strings, and has {pair[0]!r}: {pair[1]!r}")
    return dict(value)


class SafetensorsWriter(StorageWriter, BlockingAsyncStager):
    """Storage writer that lets the ranks write whole safetensors files together: for exports in the background.

    Files, arguments and errors are those of `save_safetensors`. A relative path is resolved when the writer is created.

    Ranks: every rank; the coordinator creates and publishes the files.

    Example:
        ```python
        import torch
        from dcp_async import AsyncSaver
        from dcp_format import SafetensorsWriter

        model = torch.nn.Linear(4, 2)
        with AsyncSaver("thread") as saver:
            writer = SafetensorsWriter("exported", dtype=torch.bfloat16)
            future = saver.save(model.state_dict(), storage_writer=writer)  # training goes on
            future.result()  # the files are there
        ```
    """

    stores_aliases = True
    """A tied tensor is stored under one of its names; the files' metadata names the others."""
    ids_are_paths = True
    """An id without a scheme is a path."""
    # Two would take turns at the interpreter's lock for each row of a column shard: measured 3 times slower.
    thread_count = 1
    """Number of boxes that a rank writes at the same time."""
    _always_indexed = False

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        max_file_bytes: int = MAX_FILE_BYTES,
        dtype: torch.dtype | None = None,
        rename: Mapping[str, str] | None = None,
        split: Mapping[str, str] | None = None,
        metadata: Mapping[str, str] | None = None,
        config_from: str | os.PathLike[str] | None = None,
        timeout_seconds: float | None = None,
        peers: PeerOptions | None = None,
    ) -> None:
        BlockingAsyncStager.__init__(self)
        if max_file_bytes < 1:
            raise ValueError(f"max_file_bytes={max_file_bytes} must be at least 1")
        if dtype is not None:
            check_cast(dtype)
        rename, split = _strings("rename", rename or {}), _strings("split", split or {})
        self._metadata = _strings("metadata", metadata or {})
        reserved = sorted(key for key in self._metadata if key.startswith(_RESERVED))
        if reserved:
            raise ValueError(f"metadata: keys that begin with {_RESERVED} are reserved: rename {reserved[0]!r}")
        SplitNames(split)
        self._max_file_bytes, self._dtype, self._split = max_file_bytes, dtype, split
        self._names = KeyMap(rename)
        self._config_from = None if config_from is None else absolute_id(config_from)
        self._timeout_seconds = DEFAULT_TIMEOUT_SECONDS if timeout_seconds is None else timeout_seconds
        self._peers = peers
        settings = {"max_file_bytes": max_file_bytes, "dtype": dtype}
        sorted_maps = {"rename": dict(sorted(rename.items())), "split": dict(sorted(split.items()))}
        self._settings = {name: repr(value) for name, value in (settings | sorted_maps).items()}
        open_store(folder)  # a wrong path is an error of every rank's own
        self.reset(folder)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new export, into the folder `checkpoint_id` unless it is None."""
        if checkpoint_id is not None:
            self.checkpoint_id = checkpoint_id
        self.save_id = secrets.token_hex(8)
        """Id of this export, part of its files' metadata."""
        self._order: list[str] = []
        self._files: list[PlannedFile] = []
        self._indexed = True
        self._copies: dict[str, Path] = {}
        self._link = RankLink(self._timeout_seconds, self._peers)

    @property
    def checkpoint_id(self) -> CheckpointId:
        """The folder as the caller passed it; a relative path means the working folder at that time."""
        return self._checkpoint_id

    @checkpoint_id.setter
    def checkpoint_id(self, value: CheckpointId) -> None:
        self._checkpoint_id = value
        self.absolute_id = absolute_id(value)
        """The folder, with an absolute path."""

    def _store(self) -> Store:
        return open_store(self.absolute_id)

    def storage_meta(self) -> StorageMeta | None:
        """Return the path of the folder and the save id."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raise DcpError for a save without a coordinator."""
        del is_coordinator, args
        if not kwargs.get("use_collectives", True):
            raise DcpError("safetensors files are planned by a coordinator: save with use_collectives=True")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan with this rank's facts. Raises UnsupportedValueError if there are objects."""
        refuse_objects(
            {item.index.fqn for item in plan.items if item.type == WriteItemType.BYTE_IO},
            "safetensors",
            remedy="leave them out of the state dict, or save them to another checkpoint",
        )
        self._order = [item.index.fqn for item in plan.items]
        return replace(plan, storage_data=RankFacts.of_this_rank(plan.aliases, self._settings))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the files in full size under temporary names; return the plans with the tensors' places."""
        store = self._store()
        self._copies = {} if self._config_from is None else _config_files(self._config_from)
        facts = [RankFacts.of(plan) for plan in plans]
        check_settings(facts)
        aliases = agreed_aliases(plans, facts)
        tensors = tensors_of(
            plans, self._order, dtype=self._dtype, names=self._names, aliases=aliases, split=SplitNames(self._split)
        )
        wanted, groups = self._grouped(tensors)
        self.save_id = secrets.token_hex(8)
        store.make()
        if isinstance(store, LocalStore):
            sweep(store, is_writers_name)
            stamp = Stamp.next(Path(store.path), self.save_id, len(groups))
        else:
            stamp = Stamp(self.save_id, len(groups), 1)
        names, self._indexed = choose_names(store, wanted, self.save_id, always_indexed=self._always_indexed)
        metadata = {"format": "pt", **self._metadata, **stamp.metadata}
        ranges = isinstance(store, SupportsRanges)
        files = [
            lay_out(name, group, {**metadata, **self._ties(group, aliases)}, renamed=ranges)
            for name, group in zip(names, groups, strict=True)
        ]
        placed = share_out(plans, files, [one.host for one in facts], ranges=ranges)
        if isinstance(store, SupportsRanges):
            create_files(store, files)
        self._files = files
        return placed

    def _grouped(self, tensors: Sequence[ExportedTensor]) -> tuple[Sequence[str], Sequence[Sequence[ExportedTensor]]]:
        groups = split_by_size(tensors, self._max_file_bytes, lambda tensor: tensor.nbytes)
        return shard_names(len(groups)), groups

    def _ties(self, group: Sequence[ExportedTensor], aliases: Mapping[str, str]) -> dict[str, str]:
        """Return a file's metadata for tied tensors: for our readers, and as `safetensors.torch.save_model` has it."""
        here = {tensor.fqn: tensor.name for tensor in group}
        torn = {tensor.fqn for tensor in group if tensor.slices} & {*aliases.values()}
        if torn:
            raise UnsupportedValueError(f"split: {min(torn)!r} has several names, of which files can keep only one")
        ties = {self._names.stored(alias): here[target] for alias, target in aliases.items() if target in here}
        return {**ties, STORED_ONCE: json.dumps(ties)} if ties else {}

    def connect_ranks(self, coordinator: Coordinator, plan: SavePlan) -> None:
        """Connect this rank to the others if ranks pass bytes on. Collective."""
        self._link.open(coordinator, plan)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Write this rank's parts of the files, durably; returns a completed future."""
        if not isinstance(plan.storage_data, RankPart):
            raise DcpError("the plan lost its storage data; a planner's finish_plan must keep it")
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result(self._link.write(self._store(), plan, planner, threads=self.thread_count))
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the export, then remove an older save's files."""
        store = self._store()
        check_complete(self._files, results)
        _copy_config_files(self._copies, store)
        publish(store, self._files, indexed=self._indexed)
        self._files = []
        metadata.storage_meta = self.storage_meta()

    def abort(self, error: BaseException) -> None:
        """Remove the files of a failed export."""
        del error
        self._link.close()
        for file in self._files:
            with contextlib.suppress(OSError):
                self._store().delete(file.temporary)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True: `open_store` raises if no package opens a URI."""
        del checkpoint_id
        return True


_NAMES = frozenset(
    {
        *("config.json", "generation_config.json"),
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
        *(
            "vocab.json",
            "vocab.txt",
            "merges.txt",
            "spiece.model",
            "sentencepiece.bpe.model",
            "source.spm",
            "target.spm",
        ),
        *("chat_template.jinja", "chat_template.json"),
        *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    }
)


def _config_files(folder: str | os.PathLike[str]) -> dict[str, Path]:
    place = Path(folder)
    if not (place / "config.json").is_file():
        raise CheckpointNotFoundError(f"there is no config.json in {place}: check config_from")
    return {name: place / name for name in sorted(_NAMES) if (place / name).is_file()}


def _copy_config_files(files: dict[str, Path], store: Store) -> None:
    """Copy the files, each atomically and durably; equal ones are not touched."""
    for name, path in files.items():
        if isinstance(store, LocalStore) and os.path.realpath(path) == os.path.realpath(os.path.join(store.path, name)):
            continue
        data = path.read_bytes()
        if not store.exists(name) or store.read(name) != data:
            store.publish(name, data)


def save_safetensors(
    state_dict: dict[str, Any],
    folder: str | os.PathLike[str],
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    dtype: torch.dtype | None = None,
    rename: Mapping[str, str] | None = None,
    split: Mapping[str, str] | None = None,
    metadata: Mapping[str, str] | None = None,
    config_from: str | os.PathLike[str] | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    timeout_seconds: float | None = None,
    peers: PeerOptions | None = None,
) -> None:
    """Export tensors, sharded or not, as safetensors files of whole tensors, which are durable when this returns.

    All ranks write each byte once, at its final place. Ranks pass parts of tensors that are sharded by columns on to
    each other, in bounded memory. One rank uploads an object of an object store, and gets the others' parts.

    At each moment the folder holds the earlier model, whole, or the new one. If `save_safetensors` raises, the earlier
    model is unchanged, unless the error came from removing its files.

    One file is named `model.safetensors`; several are `model-00001-of-0000N.safetensors`, with an index. A name that an
    earlier model uses gets a part of the save's id. A tied tensor is stored once, under the first of its names in the
    state dict, and the files' metadata names the others, as `safetensors.torch.save_model` does.

    Args:
        state_dict: Tensors of any kind that `save` accepts; names of nested tensors are joined by dots.
        folder: Folder of the files, created if missing, or a URI that an installed storage handles.
        max_file_bytes: Largest size of the tensors of one file. A larger tensor has its own file.
        dtype: Floating-point dtype to which floating-point tensors are cast; None for their own. Packed
            `float4_e2m1fn_x2` tensors stay as they are.
        rename: Name, or dotted prefix, in the state dict → name or prefix in the files. `{"model": ""}` drops a prefix.
        split: Name of a stacked tensor in the files → names of its slices along the first dimension, instead:
            `{"layers.*.experts.up": "layers.*.experts.{}.up.weight"}`; `*` is one part of a name, `{}` the number of
            the slice.
        metadata: Pairs of strings for the files' metadata, in addition to `{"format": "pt"}`; keys that begin with
            `DCP_` are reserved.
        config_from: Folder with a `config.json`, which is copied with the tokenizer's files; None to copy nothing.
        process_group: The ranks that hold the model; None for all ranks.
        no_dist: Whether this process exports alone, even if process groups exist.
        timeout_seconds: Time that a rank waits for the other ranks in one phase; None as for `save`.
        peers: Options for how ranks detect the death of other ranks; None for the defaults.

    Raises:
        CheckpointException: The export failed on at least one of several ranks; raised on every rank.
        UnsupportedValueError: A value is not a tensor, safetensors lacks its dtype or cannot hold its name, `split`
            names a tensor without dimensions, or two tensors would have one name.
        MissingKeyError: `rename` or `split` name a tensor that does not exist.
        CheckpointNotFoundError: `config_from` lacks `config.json`.
        OSError: The disk failed, or is full, which is noticed before anything is written.

    Ranks: every rank of the group; collective, without collectives of the trainer's group where it has a store.

    Example:
        ```python
        import torch
        from dcp_format import save_safetensors

        model = torch.nn.Linear(4, 2)
        save_safetensors(model.state_dict(), "exported", dtype=torch.bfloat16)
        ```
    """
    writer = SafetensorsWriter(
        folder,
        max_file_bytes=max_file_bytes,
        dtype=dtype,
        rename=rename,
        split=split,
        metadata=metadata,
        config_from=config_from,
        timeout_seconds=timeout_seconds,
        peers=peers,
    )
    save(
        state_dict,
        storage_writer=writer,
        process_group=process_group,
        no_dist=no_dist,
        peers=peers,
        timeout_seconds=DEFAULT_TIMEOUT_SECONDS if timeout_seconds is None else timeout_seconds,
    )
