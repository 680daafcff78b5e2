"""Mirror of `torch.distributed.checkpoint._nested_dict`: re-exports only."""

from dcp_all._traverse import set_element as set_element
from dcp_all._traverse import traverse_state_dict as traverse_state_dict
from dcp_all.metadata import STATE_DICT_TYPE as STATE_DICT_TYPE
from dcp_core.state_dict.flatten import FLATTEN_MAPPING as FLATTEN_MAPPING
from dcp_core.state_dict.flatten import STATE_DICT_ITEM as STATE_DICT_ITEM
from dcp_core.state_dict.flatten import Path
from dcp_core.state_dict.flatten import flatten_state_dict as flatten_state_dict
from dcp_core.state_dict.flatten import unflatten_state_dict as unflatten_state_dict

OBJ_PATH = Path
