"""Small checkpoints in versions that share no value, and what comes of loading one: refused, or exactly one version.

What is saved is sharded over the ranks of the default process group, if there is one; every load is of whole values
in one process.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import dcp_all as dcp
from dcp_core.errors import CheckpointNotFoundError, CorruptCheckpointError, UnsafeCheckpointError
from integration_tests.oracle.kinds import same_bits

__all__ = ["MARKER_DEBRIS", "REFUSALS", "blank", "debris", "refusal", "save", "sharded", "values", "version_in"]

REFUSALS = (CorruptCheckpointError, CheckpointNotFoundError, UnsafeCheckpointError)
# A marker on its way into the folder belongs to nobody yet: it stays until it is old.
MARKER_DEBRIS = re.compile(r"\.\.dcp-save-.*\.tmp")


def values(version: int) -> dict[str, Any]:
    """Whole values of a version: tensors of several dtypes, and objects that load with and without an allow-list."""
    maker = torch.Generator().manual_seed(version)
    return {
        "model": {
            "weight": torch.randn(5, 3, generator=maker),
            "bias": torch.randn(6, generator=maker).bfloat16(),
            "count": torch.tensor(version),
            "empty": torch.empty(0, 2),
        },
        "step": 1000 + version,
        "noise": np.arange(version, version + 4),
    }


def blank(version: int = 0) -> dict[str, Any]:
    """A template for any version; it holds no value of any."""
    filled = values(version)
    model = {key: torch.full_like(value, -7) for key, value in filled["model"].items()}
    return {"model": model, "step": None, "noise": None}


def sharded(version: int) -> dict[str, Any]:
    """The values as this rank holds them: rows of `weight`, replicas of `bias`, everything else as it is."""
    whole = values(version)
    if not dist.is_initialized():
        return whole
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()), _init_backend=False)
    model = whole["model"]
    parts = model["weight"].tensor_split([3]) if mesh.size() == 2 else model["weight"].chunk(mesh.size())
    local = {"weight": (parts[dist.get_rank()], Shard(0)), "bias": (model["bias"], Replicate())}
    for key, (part, placement) in local.items():
        value = model[key]
        model[key] = DTensor.from_local(
            part, mesh, [placement], run_check=False, shape=value.shape, stride=value.stride()
        )
    return whole


def save(
    folder: Path | str,
    version: int,
    *,
    state: dict[str, Any] | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    **writer: Any,
) -> Any:
    """Save a version, sharded over the ranks unless `no_dist`; `writer` are options of `FileSystemWriter`."""
    if state is None:
        state = values(version) if no_dist else sharded(version)
    return dcp.save(
        state,
        storage_writer=dcp.FileSystemWriter(folder, **writer),
        no_dist=no_dist,
        use_collectives=use_collectives,
    )


def refusal(folder: Path | str, version: int, **reader: Any) -> Exception | None:
    """Load in this process: None if what was loaded is exactly the version, else the error that refused it.

    Raises:
        AssertionError: What was loaded is not what was saved.
        Exception: The load failed with an error that does not say that the checkpoint is damaged or missing.
    """
    template = blank()
    try:
        dcp.load(template, storage_reader=dcp.FileSystemReader(folder, thread_count=1, **reader), no_dist=True)
    except REFUSALS as error:
        return error
    assert same_bits(template, values(version)), f"wrong values were loaded: {template}"
    return None


def version_in(folder: Path | str, versions: Iterable[int]) -> int:
    """Which of the versions loads from the folder, complete and unmixed."""
    template = blank()
    dcp.load(template, storage_reader=dcp.FileSystemReader(folder, thread_count=1), no_dist=True)
    found = [version for version in versions if same_bits(template, values(version))]
    assert len(found) == 1, f"none of the versions was loaded: {template}"
    return found[0]


def debris(folder: Path) -> list[str]:
    """Files in the folder that are no part of its checkpoint."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    wanted = {str(info.relative_path) for info in metadata.storage_data.values()}
    names = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    assert wanted <= names
    ours = re.compile(r"\.metadata" if ".metadata" in names else r"__\d+(\.\w+)?\.metadata")
    # What replicas a rank wrote is in its own index only.
    ranks = rf"__\d+_\d+\.{metadata.storage_meta.save_id}\.distcp" if ".metadata" not in names else r"(?!)"
    return sorted(name for name in names - wanted if not ours.fullmatch(name) and not re.fullmatch(ranks, name))
