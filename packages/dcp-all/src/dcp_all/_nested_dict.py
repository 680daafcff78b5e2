"""Mirror of `torch.distributed.checkpoint._nested_dict`: re-exports only."""

from dcp_all._traverse import set_element, traverse_state_dict
from dcp_all.metadata import STATE_DICT_TYPE
from dcp_core.state_dict.flatten import FLATTEN_MAPPING, STATE_DICT_ITEM, flatten_state_dict, unflatten_state_dict
from dcp_core.state_dict.flatten import Path as OBJ_PATH  # noqa: N814 - stock's name

__all__ = [
    "FLATTEN_MAPPING",
    "OBJ_PATH",
    "STATE_DICT_ITEM",
    "STATE_DICT_TYPE",
    "flatten_state_dict",
    "set_element",
    "traverse_state_dict",
    "unflatten_state_dict",
]
