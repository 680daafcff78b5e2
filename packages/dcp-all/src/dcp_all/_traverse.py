"""Mirror of `torch.distributed.checkpoint._traverse`: re-exports only."""

from dcp_all.metadata import STATE_DICT_TYPE
from dcp_core.state_dict.flatten import (
    CONTAINER_TYPE,
    STATE_DICT_ITEM,
    get_element,
    print_tensor,
    set_element,
    traverse_state_dict,
)
from dcp_core.state_dict.flatten import Path as OBJ_PATH  # noqa: N814 - stock's name
from dcp_manifest.index.columns import PathElement as PATH_ITEM  # noqa: N814 - stock's name

__all__ = [
    "CONTAINER_TYPE",
    "OBJ_PATH",
    "PATH_ITEM",
    "STATE_DICT_ITEM",
    "STATE_DICT_TYPE",
    "get_element",
    "print_tensor",
    "set_element",
    "traverse_state_dict",
]
