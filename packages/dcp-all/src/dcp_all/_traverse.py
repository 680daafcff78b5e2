"""Mirror of `torch.distributed.checkpoint._traverse`: re-exports only."""

from dcp_all.metadata import STATE_DICT_TYPE as STATE_DICT_TYPE
from dcp_core.state_dict.flatten import CONTAINER_TYPE as CONTAINER_TYPE
from dcp_core.state_dict.flatten import STATE_DICT_ITEM as STATE_DICT_ITEM
from dcp_core.state_dict.flatten import Path
from dcp_core.state_dict.flatten import get_element as get_element
from dcp_core.state_dict.flatten import print_tensor as print_tensor
from dcp_core.state_dict.flatten import set_element as set_element
from dcp_core.state_dict.flatten import traverse_state_dict as traverse_state_dict
from dcp_manifest.index.columns import PathElement

OBJ_PATH = Path
PATH_ITEM = PathElement
