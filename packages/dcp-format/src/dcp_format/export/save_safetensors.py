"""`save_safetensors`: exports a model's state dict from all ranks to files that Hugging Face libraries load."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from dcp_core import PeerOptions, save
from dcp_format.export.export_options import MAX_FILE_BYTES
from dcp_format.export.safetensors_writer import SafetensorsWriter
from dcp_ranks import DEFAULT_TIMEOUT_SECONDS

__all__ = ["save_safetensors"]


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

    All ranks write into the files at the tensors' final places: each byte is written once, and none is read back. Ranks
    pass the parts of tensors that are sharded by columns on to each other, in bounded memory, and write long ranges. An
    object of an object store is uploaded by one rank, which gets the others' parts.

    The files appear under their names when all ranks have written, and then the index; at each moment the folder holds
    the earlier model, whole, or the new one. If `save_safetensors` raises, the earlier model is unchanged, unless the
    error came from removing its files.

    One file is named `model.safetensors`; several are `model-00001-of-0000N.safetensors`, with an index. A name that an
    earlier model uses gets a part of the save's id. A tied tensor is stored once, under the first of its names in the
    state dict, and the files' metadata names the others, as `safetensors.torch.save_model` does.

    Args:
        state_dict: Tensors of any kind that `save` accepts, nested or not; names of nested tensors are joined by dots.
        folder: Folder of the files, made if missing, or a URI that an installed storage handles.
        max_file_bytes: Largest size of the tensors of one file, bytes. A larger tensor has a file of its own.
        dtype: Floating-point dtype to which floating-point tensors are cast while they are written; None for their own.
            Packed `float4_e2m1fn_x2` tensors stay as they are.
        rename: Name, or dotted prefix of several names, in the state dict → name or prefix in the files. `{"model":
            ""}` drops a prefix.
        split: Name of a stacked tensor in the files → names of its slices along the first dimension, in its place:
            `{"layers.*.experts.up": "layers.*.experts.{}.up.weight"}`; `*` is one part of a name, `{}` the number of
            the slice.
        metadata: Pairs of strings for the files' metadata, in addition to `{"format": "pt"}`; keys that begin with
            `DCP_` are reserved.
        config_from: Folder with a `config.json`, which is copied with the tokenizer's files, right before the new files
            get their names; None to copy nothing.
        process_group: Process group of the ranks that hold the model; None for all ranks.
        no_dist: Whether this process exports alone, even if process groups exist.
        timeout_seconds: Time in seconds that a rank waits for the other ranks in one phase; None as for `save`.
        peers: Options for how ranks detect the death of other ranks; None for the defaults.

    Raises:
        CheckpointException: The export failed on at least one of several ranks; raised on every rank.
        UnsupportedValueError: A value is not a tensor, safetensors lacks its dtype or cannot hold its name, or `split`
            names a tensor without dimensions.
        DuplicateKeyError, MissingKeyError: `rename` or `split` give two tensors one name, or name what is not there.
        TypeError, ValueError: An option is not of the form described above.
        CheckpointNotFoundError: `config_from` has no `config.json`.
        OSError: The disk is full, which is noticed before anything is written, or failed.

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
