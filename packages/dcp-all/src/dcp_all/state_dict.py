"""Mirror of `torch.distributed.checkpoint.state_dict`: re-exports only."""

from dcp_state.app import get_state_dict, set_state_dict
from dcp_state.model import get_model_state_dict, set_model_state_dict
from dcp_state.optimizer.optimizer_state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from dcp_state.options import (
    FQNS_T,
    DictValueType,
    ListDictValueType,
    OptimizerStateType,
    PrimitiveType,
    StateDictOptions,
    ValueType,
)

__all__ = [
    "FQNS_T",
    "DictValueType",
    "ListDictValueType",
    "OptimizerStateType",
    "PrimitiveType",
    "StateDictOptions",
    "ValueType",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]
