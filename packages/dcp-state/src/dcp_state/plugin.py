"""Registration of this package's adapters by a hook. Does not import torch."""

from dcp_hooks import hookimpl

__all__ = ["dcp_register_state_adapters"]


@hookimpl
def dcp_register_state_adapters() -> dict[str, str]:
    """Return name of each adapter for PyTorch's wrappers and optimizers → import path of its class."""
    return {
        "checkpointed": "dcp_state.wrappers.checkpointed:CheckpointedAdapter",
        "compiled": "dcp_state.wrappers.compiled:CompiledAdapter",
        "ddp": "dcp_state.wrappers.ddp:DdpAdapter",
        "fsdp1": "dcp_state.wrappers.fsdp1:Fsdp1Adapter",
        "fsdp2": "dcp_state.wrappers.fsdp2:Fsdp2Adapter",
        "lbfgs": "dcp_state.wrappers.lbfgs:LbfgsAdapter",
    }
