"""Public names for packages that extend `dcp_core`: savers, storages, planners, converters and state dict adapters.

Functions for users are in `dcp_core` itself. The names in both modules are stable; those of all other modules of this
package may change.
"""

from __future__ import annotations

from dcp_core.adopt_foreign import adopt_reader, adopt_save_planner, adopt_writer
from dcp_core.calls.child_interpreter import module_command
from dcp_core.calls.outside_compile import outside_compile
from dcp_core.calls.positional import without_positional_path
from dcp_core.encoding.compression import CompressedRequest, Compression, CompressionPolicy, one_setting
from dcp_core.encoding.payloads import tensor_payload
from dcp_core.events import note_rate
from dcp_core.hosts.agree import agree_on_copy
from dcp_core.hosts.agreement import HostAgreement
from dcp_core.hosts.commit import HostCommit
from dcp_core.hosts.held_copies import AgreedCopy
from dcp_core.hosts.host_places import HostPlaces, find_places
from dcp_core.hosts.host_storage import HostStorageReader, HostStorageWriter
from dcp_core.logs import LOGGER_NAME, library_logger
from dcp_core.objects.allowed_globals import allowed_globals, how_to_allow
from dcp_core.objects.object_archive import ObjectArchive, read_archive
from dcp_core.objects.object_bytes import DumpedObject, dump_object, load_object, reduce_exactly, scan
from dcp_core.planning.comparable_bytes import same_value, value_bytes, value_digest
from dcp_core.planning.load_report import suggest
from dcp_core.records.abilities import SavePlannerAbilities, WriterAbilities, abilities, set_up_save_planner, takes
from dcp_core.records.foreign_records import as_index, as_metadata, as_write_item
from dcp_core.records.lazy import LazyList
from dcp_core.records.metadata import DeferredMetadata, note_checkpoint_id
from dcp_core.records.protocols import CheckpointId, in_shared_order, is_stateful, placed_plans, with_states
from dcp_core.saving import save_with
from dcp_core.shards.fed_tensors import TensorFeed
from dcp_core.shards.mesh_boxes import LocalBox, local_boxes
from dcp_core.shards.shards import LocalShard, LocalTensor, box_view, local_tensor, sharded_dims
from dcp_core.shards.tensor_checks import check_memory
from dcp_core.state_dict.empty_mappings import name_empty_mappings, restore_empty_mappings
from dcp_core.state_dict.flatten import flatten, holds_entry, unflatten_state_dict
from dcp_core.state_dict.holders import HeldTensor, find_holders
from dcp_core.state_dict.key_map import KeyMap
from dcp_core.state_dict.per_rank import with_rank_values
from dcp_core.storage.checkpoint_ids import absolute_id, absolute_id_for
from dcp_core.storage.file_attributes import FileAttributes
from dcp_core.storage.gc_pause import collector_paused
from dcp_core.storage.item_decoder import ItemDecoder, PartialItem
from dcp_core.storage.serialization_format import SerializationFormat, check_format
from dcp_core.storage_choice import resolve_writer
from dcp_core.tables.value_table import is_plain
from dcp_core.tensors.dtensors import is_dtensor
from dcp_core.tensors.element_copy import contiguous, copy_elements
from dcp_core.tensors.quantized import archive_quantized, is_quantized_dtype
from dcp_core.tensors.tensor_bytes import tensor_bytes
from dcp_core.tensors.tensor_pieces import TensorPieces

__all__ = [
    "LOGGER_NAME",
    "AgreedCopy",
    "CheckpointId",
    "CompressedRequest",
    "Compression",
    "CompressionPolicy",
    "DeferredMetadata",
    "DumpedObject",
    "FileAttributes",
    "HeldTensor",
    "HostAgreement",
    "HostCommit",
    "HostPlaces",
    "HostStorageReader",
    "HostStorageWriter",
    "ItemDecoder",
    "KeyMap",
    "LazyList",
    "LocalBox",
    "LocalShard",
    "LocalTensor",
    "ObjectArchive",
    "PartialItem",
    "SavePlannerAbilities",
    "SerializationFormat",
    "TensorFeed",
    "TensorPieces",
    "WriterAbilities",
    "abilities",
    "absolute_id",
    "absolute_id_for",
    "adopt_reader",
    "adopt_save_planner",
    "adopt_writer",
    "agree_on_copy",
    "allowed_globals",
    "archive_quantized",
    "as_index",
    "as_metadata",
    "as_write_item",
    "box_view",
    "check_format",
    "check_memory",
    "collector_paused",
    "contiguous",
    "copy_elements",
    "dump_object",
    "find_holders",
    "find_places",
    "flatten",
    "holds_entry",
    "how_to_allow",
    "in_shared_order",
    "is_dtensor",
    "is_plain",
    "is_quantized_dtype",
    "is_stateful",
    "library_logger",
    "load_object",
    "local_boxes",
    "local_tensor",
    "module_command",
    "name_empty_mappings",
    "note_checkpoint_id",
    "note_rate",
    "one_setting",
    "outside_compile",
    "placed_plans",
    "read_archive",
    "reduce_exactly",
    "resolve_writer",
    "restore_empty_mappings",
    "same_value",
    "save_with",
    "scan",
    "set_up_save_planner",
    "sharded_dims",
    "suggest",
    "takes",
    "tensor_bytes",
    "tensor_payload",
    "unflatten_state_dict",
    "value_bytes",
    "value_digest",
    "with_rank_values",
    "with_states",
    "without_positional_path",
]
