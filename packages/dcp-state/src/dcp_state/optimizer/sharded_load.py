"""`load_sharded_optimizer_state_dict`: optimizer state for FSDP1 models, allocated from the checkpoint's metadata.

No optimizer is needed: state with the shape of its parameter is sharded like the parameter; other state is whole.

Source: torch 2.13 `torch.distributed.checkpoint.optimizer.load_sharded_optimizer_state_dict`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from dcp_core import DefaultLoadPlanner, LoadPlanner, Metadata, StorageReader, TensorStorageMetadata, load
from dcp_core.errors import MissingKeyError
from dcp_core.toolkit import adopt_reader, unflatten_state_dict

__all__ = ["load_sharded_optimizer_state_dict"]


def load_sharded_optimizer_state_dict(
    model_state_dict: dict[str, Any],
    optimizer_key: str,
    storage_reader: StorageReader,
    planner: LoadPlanner | None = None,
) -> dict[str, Any]:
    """Load the optimizer state under a key of a checkpoint for an FSDP1 model.

    Args:
        model_state_dict: Sharded state dict of the model, by FQN; optimizer state is sharded like its parameter.
        optimizer_key: Key of the optimizer state in the saved state dict.
        storage_reader: Storage reader of the checkpoint.
        planner: Load planner; None for `DefaultLoadPlanner`.

    Returns:
        `{optimizer_key: state}`, nested like the saved state dict, with sharded tensors, whole tensors and objects.

    Raises:
        MissingKeyError: The checkpoint has no value below `optimizer_key`.
        CheckpointException: Reading failed on one of several ranks; raised on all of them.

    Ranks: every rank of the default group; collective.
    Source: torch 2.13 `optimizer.load_sharded_optimizer_state_dict`.
    """
    storage_reader = adopt_reader(storage_reader) or storage_reader
    metadata = storage_reader.read_metadata()
    paths = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    wanted = [
        name
        for name in metadata.state_dict_metadata
        if (paths[name][0] if name in paths else name.partition(".")[0]) == optimizer_key
    ]
    if not wanted:
        raise MissingKeyError(
            f"the checkpoint has nothing under {optimizer_key!r}; pass the key that it was saved under"
        )
    template = {name: _allocate(name, paths.get(name, ()), metadata, model_state_dict) for name in wanted}
    load(template, storage_reader=storage_reader, planner=planner or DefaultLoadPlanner())
    return dict(unflatten_state_dict(template, {name: paths[name] for name in wanted if name in paths}))


def _allocate(name: str, path: tuple[Any, ...], metadata: Metadata, model: Mapping[str, Any]) -> Any:
    """Allocate the destination of one value."""
    stored = metadata.state_dict_metadata[name]
    if not isinstance(stored, TensorStorageMetadata):
        return None
    parameter = next((model[element] for element in path if element in model), None)
    dtype = stored.properties.dtype
    if parameter is not None and tuple(parameter.shape) == tuple(stored.size) and stored.size:
        # A copy has the sharding; its dtype may differ from that of the state.
        made = copy.deepcopy(parameter) if hasattr(parameter, "local_shards") else torch.empty_like(parameter)
        return made if made.dtype == dtype else made.to(dtype)
    device = torch.device("cuda") if dist.is_initialized() and dist.get_backend() == "nccl" else torch.device("cpu")
    return torch.empty(stored.size, dtype=dtype, device=device)
