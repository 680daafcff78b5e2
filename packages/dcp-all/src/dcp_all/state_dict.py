"""Mirror of `torch.distributed.checkpoint.state_dict`: re-exports only."""

from dcp_state.app import get_state_dict as get_state_dict
from dcp_state.app import set_state_dict as set_state_dict
from dcp_state.model import get_model_state_dict as get_model_state_dict
from dcp_state.model import set_model_state_dict as set_model_state_dict
from dcp_state.optimizer.optimizer_state_dict import get_optimizer_state_dict as get_optimizer_state_dict
from dcp_state.optimizer.optimizer_state_dict import set_optimizer_state_dict as set_optimizer_state_dict
from dcp_state.options import FQNS_T as FQNS_T
from dcp_state.options import DictValueType as DictValueType
from dcp_state.options import ListDictValueType as ListDictValueType
from dcp_state.options import OptimizerStateType as OptimizerStateType
from dcp_state.options import PrimitiveType as PrimitiveType
from dcp_state.options import StateDictOptions as StateDictOptions
from dcp_state.options import ValueType as ValueType
