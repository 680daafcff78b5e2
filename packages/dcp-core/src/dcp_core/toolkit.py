"""Parts for packages that extend this one: savers, storages, planners, converters and adapters of state dicts.

What users call is in `dcp_core` itself. These names are as stable, and everything else in this package may change.
"""

from __future__ import annotations

from dcp_core.adopt_foreign import adopt_reader, adopt_save_planner, adopt_writer
from dcp_core.child_interpreter import module_command
from dcp_core.encoding.compression import CompressedRequest, Compression, CompressionPolicy, one_setting
from dcp_core.encoding.payloads import tensor_payload
from dcp_core.objects.allowed_globals import allowed_globals
from dcp_core.objects.object_archive import ObjectArchive, read_archive
from dcp_core.objects.objects import DumpedObject, dump_object, load_object, reduce_exactly, scan
from dcp_core.outside_compile import outside_compile
from dcp_core.planning.comparable_bytes import same_value, value_bytes, value_digest
from dcp_core.planning.load_report import suggest
from dcp_core.records.foreign_records import as_index, as_metadata, as_write_item
from dcp_core.records.lazy import LazyList
from dcp_core.records.metadata import DeferredMetadata, note_checkpoint_id
from dcp_core.records.protocols import CheckpointId, in_shared_order, is_stateful, placed_plans, with_states
from dcp_core.saving import save_with
from dcp_core.shards.mesh_boxes import LocalBox, local_boxes
from dcp_core.shards.shards import LocalShard, LocalTensor, box_view, local_tensor, sharded_dims
from dcp_core.shards.tensor_checks import check_memory
from dcp_core.state_dict.empty_mappings import name_empty_mappings, restore_empty_mappings
from dcp_core.state_dict.flatten import flatten, holds_entry, unflatten_state_dict
from dcp_core.state_dict.key_map import KeyMap
from dcp_core.state_dict.per_rank import with_rank_values
from dcp_core.storage.checkpoint_ids import absolute_id, absolute_id_for
from dcp_core.storage.file_attributes import FileAttributes
from dcp_core.storage.gc_pause import collector_paused
from dcp_core.storage.item_decoder import ItemDecoder, PartialItem
from dcp_core.storage.storage_choice import resolve_writer
from dcp_core.tables.value_table import is_plain
from dcp_core.tensors.dtensors import is_dtensor
from dcp_core.tensors.element_copy import contiguous, copy_elements
from dcp_core.tensors.quantized import archive_quantized, is_quantized_dtype
from dcp_core.tensors.tensor_bytes import tensor_bytes
from dcp_core.tensors.tensor_pieces import TensorPieces

__all__ = [
    # Values of a state dict: names, states, and which part of a tensor a rank holds.
    "KeyMap",
    "LocalBox",
    "LocalShard",
    "LocalTensor",
    "box_view",
    "check_memory",
    "contiguous",
    "copy_elements",
    "flatten",
    "holds_entry",
    "in_shared_order",
    "is_dtensor",
    "is_plain",
    "is_quantized_dtype",
    "is_stateful",
    "local_boxes",
    "local_tensor",
    "name_empty_mappings",
    "restore_empty_mappings",
    "sharded_dims",
    "tensor_bytes",
    "unflatten_state_dict",
    "with_rank_values",
    "with_states",
    # Objects: to bytes and back without running what the bytes say; values compared by bits.
    "DumpedObject",
    "ObjectArchive",
    "allowed_globals",
    "dump_object",
    "load_object",
    "read_archive",
    "reduce_exactly",
    "same_value",
    "scan",
    "value_bytes",
    "value_digest",
    # Records: those of stock made ours, and those that are made when they are looked at.
    "DeferredMetadata",
    "LazyList",
    "as_index",
    "as_metadata",
    "as_write_item",
    "note_checkpoint_id",
    # Storages: ids, attributes that stock has, and what an item's value becomes on its way.
    "CheckpointId",
    "CompressedRequest",
    "Compression",
    "CompressionPolicy",
    "FileAttributes",
    "ItemDecoder",
    "PartialItem",
    "TensorPieces",
    "absolute_id",
    "absolute_id_for",
    "archive_quantized",
    "one_setting",
    "tensor_payload",
    # Calls: a save with a coordinator of the caller's, and what goes around one.
    "adopt_reader",
    "adopt_save_planner",
    "adopt_writer",
    "collector_paused",
    "module_command",
    "outside_compile",
    "placed_plans",
    "resolve_writer",
    "save_with",
    "suggest",
]
