"""Mirror of `torch.distributed.checkpoint.default_planner`: re-exports only."""

from dcp_all._dedup_save_plans import dedup_save_plans as dedup_save_plans
from dcp_all._nested_dict import flatten_state_dict as flatten_state_dict
from dcp_all._traverse import set_element as set_element
from dcp_all.metadata import STATE_DICT_TYPE as STATE_DICT_TYPE
from dcp_all.metadata import BytesStorageMetadata as BytesStorageMetadata
from dcp_all.metadata import ChunkStorageMetadata as ChunkStorageMetadata
from dcp_all.metadata import Metadata as Metadata
from dcp_all.metadata import MetadataIndex as MetadataIndex
from dcp_all.metadata import StorageMeta as StorageMeta
from dcp_all.metadata import TensorStorageMetadata as TensorStorageMetadata
from dcp_all.planner import LoadPlan as LoadPlan
from dcp_all.planner import LoadPlanner as LoadPlanner
from dcp_all.planner import ReadItem as ReadItem
from dcp_all.planner import SavePlan as SavePlan
from dcp_all.planner import SavePlanner as SavePlanner
from dcp_all.planner import WriteItem as WriteItem
from dcp_all.planner import WriteItemType as WriteItemType
from dcp_all.utils import find_state_dict_object as find_state_dict_object
from dcp_core.planning.load_planner import DefaultLoadPlanner as DefaultLoadPlanner
from dcp_core.planning.load_planner import EmptyStateDictLoadPlanner as EmptyStateDictLoadPlanner
from dcp_core.planning.load_planner import create_default_global_load_plan as create_default_global_load_plan
from dcp_core.planning.load_planner import create_default_local_load_plan as create_default_local_load_plan
from dcp_core.planning.save_planner import DefaultSavePlanner as DefaultSavePlanner
from dcp_core.planning.save_planner import create_default_local_save_plan as create_default_local_save_plan
from dcp_core.planning.stock_global_plan import create_default_global_save_plan as create_default_global_save_plan
from dcp_core.records.metadata import STORAGE_TYPES as STORAGE_TYPES
from dcp_core.state_dict.flatten import FLATTEN_MAPPING as FLATTEN_MAPPING

_EmptyStateDictLoadPlanner = EmptyStateDictLoadPlanner
