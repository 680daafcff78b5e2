"""Adapters of PyTorch's wrappers, and of optimizers with special state.

FSDP2 (`fully_shard`) adds no wrapper module: parameters are DTensors while they are sharded. Between forward and
backward, a module may have unsharded parameters, which are not the optimizer's. `module.compile()` needs no adapter.

Source: torch 2.13 `FullyShardedDataParallel.{state_dict_type,optim_state_dict,optim_state_dict_to_load}`.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.distributed.fsdp import (
    FSDPModule,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.nn.parallel import DataParallel, DistributedDataParallel

from dcp_core.errors import UnsupportedValueError
from dcp_state.adapters import Layer, ModuleAdapter, OptimizerAdapter
from dcp_state.options import StateDictOptions


class Fsdp1Adapter(ModuleAdapter):
    """Removes `_fsdp_wrapped_module.` from names, and gets sharded or whole state by FSDP's functions."""

    gathers: ClassVar[bool] = True
    owns_optimizer_state: ClassVar[bool] = True

    def handles(self, kind: type[nn.Module]) -> bool:
        """See `ModuleAdapter`."""
        return issubclass(kind, FullyShardedDataParallel)

    def layer(self, module: nn.Module) -> Layer:
        """FSDP's hooks remove the prefix from keys."""
        del module
        return Layer("_fsdp_wrapped_module", in_keys=False)

    def joined_parameters(self, module: nn.Module) -> Mapping[torch.Tensor, list[str]]:
        """See `ModuleAdapter`; empty with `use_orig_params`, which hides it."""
        handle = getattr(module, "_handle", None)
        if handle is None or handle._use_orig_params:  # noqa: SLF001 - there is no public way
            return {}
        return {handle.flat_param: list(handle.flat_param._fqns)}  # noqa: SLF001 - as above

    def around(self, root: nn.Module, options: StateDictOptions) -> contextlib.AbstractContextManager[Any]:
        """State dicts have shards, or whole tensors with `full_state_dict`."""
        return _state_dict_type(root, options)

    def name_optimizer_state(
        self, root: nn.Module, optimizer: torch.optim.Optimizer, packed: dict[str, Any], options: StateDictOptions
    ) -> dict[str, Any]:
        """Return the result of FSDP's `optim_state_dict`."""
        with _state_dict_type(root, options):
            return dict(FullyShardedDataParallel.optim_state_dict(root, optimizer, packed))

    def pack_optimizer_state(
        self, root: nn.Module, optimizer: torch.optim.Optimizer, named: dict[str, Any], options: StateDictOptions
    ) -> dict[str, Any]:
        """Return the result of FSDP's `optim_state_dict_to_load`."""
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


class CheckpointedAdapter(ModuleAdapter):
    """Removes `_checkpoint_wrapped_module.` from names."""

    def handles(self, kind: type[nn.Module]) -> bool:
        """See `ModuleAdapter`."""
        return issubclass(kind, ActivationWrapper)

    def layer(self, module: nn.Module) -> Layer:
        """See `ModuleAdapter`."""
        del module
        return Layer("_checkpoint_wrapped_module", in_keys=False)


class CompiledAdapter(ModuleAdapter):
    """Removes `_orig_mod.` from names."""

    def handles(self, kind: type[nn.Module]) -> bool:
        """See `ModuleAdapter`. Does not import `torch._dynamo`, which is slow."""
        dynamo = sys.modules.get("torch._dynamo.eval_frame")
        return dynamo is not None and issubclass(kind, dynamo.OptimizedModule)

    def layer(self, module: nn.Module) -> Layer:
        """See `ModuleAdapter`."""
        del module
        return Layer("_orig_mod", in_keys=True)


class DdpAdapter(ModuleAdapter):
    """Removes `module.` from names."""

    def handles(self, kind: type[nn.Module]) -> bool:
        """See `ModuleAdapter`."""
        return issubclass(kind, (DistributedDataParallel, DataParallel))

    def layer(self, module: nn.Module) -> Layer:
        """See `ModuleAdapter`."""
        del module
        return Layer("module", in_keys=True)


class Fsdp2Adapter(ModuleAdapter):
    """Reshards modules before their parameters are named."""

    def handles(self, kind: type[nn.Module]) -> bool:
        """Return whether `fully_shard` changed the module's class."""
        return issubclass(kind, FSDPModule)

    def prepare(self, module: nn.Module) -> None:
        """Reshard the module's parameters, as its own `state_dict` does."""
        if isinstance(module, FSDPModule):
            module.reshard()


class LbfgsAdapter(OptimizerAdapter):
    """Refuses LBFGS; the message names an alternative."""

    def handles(self, kind: type[torch.optim.Optimizer]) -> bool:
        """See `OptimizerAdapter`."""
        return issubclass(kind, torch.optim.LBFGS)

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """See `OptimizerAdapter`."""
        raise UnsupportedValueError(
            f"{type(optimizer).__name__} keeps one history for all parameters together, which has no names and cannot "
            "be resharded; save `optimizer.state_dict()` as it is, for a resume with the same parameters"
        )


class TorchaoAdapter(OptimizerAdapter):
    """Makes initial state as the optimizer does: a trial step would compile its step."""

    def handles(self, kind: type[torch.optim.Optimizer]) -> bool:
        """See `OptimizerAdapter`. Does not import torchao."""
        return any(
            base.__module__ == "torchao.optim.adam" and base.__name__ == "_AdamBase" and hasattr(base, "_new_buffer")
            for base in kind.__mro__
        )

    def initial_state(
        self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: torch.Tensor
    ) -> dict[str, Any]:
        """Return zeros in the optimizer's own tensor class."""
        make: Any = optimizer._new_buffer  # type: ignore[attr-defined] # noqa: SLF001
        state = {
            "step": torch.tensor(0.0, device="cpu"),
            "exp_avg": make(parameter, True),
            "exp_avg_sq": make(parameter, False),
        }
        if group["amsgrad"]:
            state["max_exp_avg_sq"] = make(parameter, False)
        return state
