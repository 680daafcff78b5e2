"""Registers this package's adapters, without importing torch."""

from dcp_base import hookimpl


@hookimpl
def dcp_register_state_adapters() -> dict[str, str]:
    """Return adapter's name → import path."""
    return {
        "checkpointed": "dcp_state.wrappers:CheckpointedAdapter",
        "compiled": "dcp_state.wrappers:CompiledAdapter",
        "ddp": "dcp_state.wrappers:DdpAdapter",
        "fsdp1": "dcp_state.wrappers:Fsdp1Adapter",
        "fsdp2": "dcp_state.wrappers:Fsdp2Adapter",
        "lbfgs": "dcp_state.wrappers:LbfgsAdapter",
        "torchao": "dcp_state.wrappers:TorchaoAdapter",
    }
