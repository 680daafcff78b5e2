"""Adapter of FSDP1 (`FullyShardedDataParallel`), whose own functions return state by parameter name.

Source: torch 2.13 `FullyShardedDataParallel.{state_dict_type,optim_state_dict,optim_state_dict_to_load}`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)

from dcp_state.adapters import Layer, ModuleAdapter
from dcp_state.options import StateDictOptions

__all__ = ["Fsdp1Adapter"]


class Fsdp1Adapter(ModuleAdapter):
    """Adapter that removes `_fsdp_wrapped_module.` from names, and gets sharded or whole state by FSDP's functions."""

    gathers: ClassVar[bool] = True
    owns_optimizer_state: ClassVar[bool] = True

    def handles(self, kind: type[nn.Module]) -> bool:
        """Whether the class is `FullyShardedDataParallel`."""
        return issubclass(kind, FullyShardedDataParallel)

    def layer(self, module: nn.Module) -> Layer:
        """Return the layer that leads to the wrapped module; FSDP's hooks remove its prefix from state dict keys."""
        del module
        return Layer("_fsdp_wrapped_module", in_keys=False)

    def joined_parameters(self, module: nn.Module) -> Mapping[torch.Tensor, list[str]]:
        """Return the flat parameter and the paths of its parameters; empty with `use_orig_params`, which hides it."""
        handle = getattr(module, "_handle", None)
        if handle is None or handle._use_orig_params:  # noqa: SLF001 - there is no public way
            return {}
        return {handle.flat_param: list(handle.flat_param._fqns)}  # noqa: SLF001 - as above

    def around(self, root: nn.Module, options: StateDictOptions) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager in which FSDP's state dicts have shards, or whole tensors with `full_state_dict`."""
        return _state_dict_type(root, options)

    def name_optimizer_state(
        self, root: nn.Module, optimizer: torch.optim.Optimizer, packed: dict[str, Any], options: StateDictOptions
    ) -> dict[str, Any]:
        """Return the result of FSDP's `optim_state_dict`: state and groups with names of parameters."""
        with _state_dict_type(root, options):
            return dict(FullyShardedDataParallel.optim_state_dict(root, optimizer, packed))

    def pack_optimizer_state(
        self, root: nn.Module, optimizer: torch.optim.Optimizer, named: dict[str, Any], options: StateDictOptions
    ) -> dict[str, Any]:
        """Return the argument for `optimizer.load_state_dict`, which FSDP's `optim_state_dict_to_load` makes."""
        with _state_dict_type(root, options):
            return dict(FullyShardedDataParallel.optim_state_dict_to_load(root, optimizer, named))


@contextlib.contextmanager
def _state_dict_type(root: nn.Module, options: StateDictOptions) -> Iterator[None]:
    offload = options.cpu_offload
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        # FSDP1 itself says that it is deprecated; a second warning would not help.
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", UserWarning)
        if options.full_state_dict:
            # On the CPU torch's own offload reads memory that it has freed; `whole` drops the other ranks' copies.
            on_cpu = next((parameter.device.type for parameter in root.parameters()), "cpu") == "cpu"
            offload = offload and not on_cpu
            first_only = offload and not options.broadcast_from_rank0
            context = FullyShardedDataParallel.state_dict_type(
                root,
                StateDictType.FULL_STATE_DICT,
                FullStateDictConfig(offload_to_cpu=offload, rank0_only=first_only),
                FullOptimStateDictConfig(offload_to_cpu=offload, rank0_only=first_only),
            )
        else:
            context = FullyShardedDataParallel.state_dict_type(
                root,
                StateDictType.SHARDED_STATE_DICT,
                ShardedStateDictConfig(offload_to_cpu=offload),
                ShardedOptimStateDictConfig(offload_to_cpu=offload),
            )
        stack.enter_context(context)
        yield
