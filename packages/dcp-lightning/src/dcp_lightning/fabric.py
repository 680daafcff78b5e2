"""Strategies of Fabric with ranks that save and load their own parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dcp_lightning.checkpoint_io import PathLike
from dcp_lightning.sharded import OwnCheckpointIO, is_of_lightning, load_shards, state_of

try:
    from lightning.fabric.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
except ModuleNotFoundError:
    from lightning_fabric.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy


class DcpFabricStrategy(OwnCheckpointIO):
    """Mix-in before a strategy of Fabric, with the `DcpCheckpointIO` among Fabric's plugins.

    Ranks: every rank of the job; saving and loading are collective.
    Source: Lightning 2.6 `lightning.fabric.strategies.Strategy` (the overridden methods).
    """

    def save_checkpoint(
        self,
        path: PathLike,
        state: Mapping[str, Any],
        storage_options: Any = None,
        filter: Mapping[str, Callable[[str, Any], bool]] | None = None,  # noqa: A002 - Lightning's name
    ) -> None:
        """Save each rank's shards, and everything else from rank 0."""
        modules = [value for value in state.values() if isinstance(value, nn.Module)]
        mine = {}
        for name, value in state.items():
            if isinstance(value, nn.Module | Optimizer):
                found = state_of(value, modules)
            elif self.is_global_zero or isinstance(value, DTensor):
                found = value.state_dict() if hasattr(value, "state_dict") else value
            else:
                continue
            chosen = (filter or {}).get(name) if isinstance(found, Mapping) else None
            mine[name] = found if chosen is None else {key: item for key, item in found.items() if chosen(key, item)}
        place = self.broadcast(str(path))
        self.checkpoint_io.save(mine, place, storage_options, leads=self.is_global_zero)

    def load_checkpoint(
        self, path: PathLike, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load each rank's shards into `state`; return the entries that `state` lacks."""
        place = self.broadcast(self.checkpoint_io.source_of(path))
        if is_of_lightning(place) or isinstance(state, nn.Module | Optimizer):
            return super().load_checkpoint(place, state, strict, weights_only)  # type: ignore[no-any-return]
        parts = {name: value for name, value in (state or {}).items() if isinstance(value, nn.Module | Optimizer)}
        rest = self.checkpoint_io.load_except(place, parts, weights_only=weights_only)
        wanted = [name for name in state or {} if name not in parts]
        missing = [name for name in wanted if name not in rest]
        if strict and missing:
            raise KeyError(f"{place} has no entries {missing}; to load it without them pass strict=False")
        if parts:
            load_shards(self.checkpoint_io, place, parts, strict=strict, weights_only=weights_only)
        for name in wanted:
            if name in rest and hasattr(state[name], "load_state_dict"):
                state[name].load_state_dict(rest.pop(name))
            elif name in rest:
                state[name] = rest.pop(name)
        return rest


class DcpDDPStrategy(DcpFabricStrategy, DDPStrategy):
    """`DDPStrategy` in which ranks share the writing of replicated state."""


class DcpFSDPStrategy(DcpFabricStrategy, FSDPStrategy):
    """`FSDPStrategy` that saves and loads shards with any `state_dict_type`."""


class DcpModelParallelStrategy(DcpFabricStrategy, ModelParallelStrategy):
    """`ModelParallelStrategy` (FSDP2, tensor parallelism) that saves and loads shards."""
