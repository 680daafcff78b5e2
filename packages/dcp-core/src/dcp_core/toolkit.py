"""Public names for packages that extend `dcp_core`.

Names in this module are provisional (see `docs/development/support.md`); modules that no front door exports may change.
"""

from __future__ import annotations

from dcp_core.arguments import (
    absolute_id,
    absolute_id_for,
    adopted,
    resolve_storage,
)
from dcp_core.calls import module_command, outside_compile, without_positional_path
from dcp_core.encoding.compression import CompressedRequest, Compression, CompressionPolicy, one_setting
from dcp_core.events import note_rate
from dcp_core.hosts.agree import HostAgreement
from dcp_core.hosts.commit import HostCommit
from dcp_core.hosts.host_places import HostPlaces, find_places
from dcp_core.hosts.host_storage import HostStorageReader, HostStorageWriter
from dcp_core.logs import LOGGER_NAME, library_logger
from dcp_core.objects.allowed_globals import allowed_globals, how_to_allow
from dcp_core.objects.object_bytes import (
    DumpedObject,
    ObjectArchive,
    dump_object,
    load_object,
    read_archive,
    reduce_exactly,
    scan,
)
from dcp_core.planning.load_report import suggest
from dcp_core.planning.replicas import same_value, value_bytes, value_digest
from dcp_core.records.foreign_records import as_index, as_metadata, as_write_item
from dcp_core.records.lazy import LazyList
from dcp_core.records.metadata import DeferredMetadata, note_checkpoint_id
from dcp_core.records.protocols import (
    CheckpointId,
    PartialState,
    in_shared_order,
    is_stateful,
    set_up_save_planner,
    takes,
    with_states,
)
from dcp_core.saving import save_with
from dcp_core.shards.boxes import LocalBox, dtensor_boxes
from dcp_core.shards.shards import (
    LocalShard,
    LocalTensor,
    box_view,
    holds_shard,
    local_tensor,
    shard_method,
    written_tensor,
)
from dcp_core.state_dict.flatten import (
    KeyMap,
    flatten,
    holds_entry,
    name_empty_mappings,
    restore_empty_mappings,
    unflatten_state_dict,
)
from dcp_core.state_dict.holders import find_holders
from dcp_core.state_dict.per_rank import with_rank_values
from dcp_core.storage.byte_storage import FileAttributes, SerializationFormat, check_format, collector_paused
from dcp_core.storage.item_decoder import ItemDecoder, PartialItem
from dcp_core.storage.storage_writer import tensor_payload
from dcp_core.tables.plan_columns import columns_of
from dcp_core.tables.value_table import archive_checked, is_plain
from dcp_core.tensors.devices import (
    CopyStream,
    accelerator,
    device_module,
    devices_in_use,
    group_device,
    on_this_stream,
    pin,
)
from dcp_core.tensors.kinds import (
    DESCRIBING,
    ArchivedTensor,
    archive_quantized,
    as_dtensor,
    children_of,
    clone_tensor,
    described_like,
    dtensor_layout,
    is_dtensor,
    is_quantized_dtype,
    is_wrapper,
    plain_values,
    rebuilt,
    unwrapped,
    with_local,
)
from dcp_core.tensors.tensor_memory import TensorPieces, check_memory, contiguous, copy_elements, tensor_bytes
from dcp_io.archives.crc import combine as combine_crcs
from dcp_io.archives.crc import crc32

__all__ = [
    "DESCRIBING",
    "LOGGER_NAME",
    "ArchivedTensor",
    "CheckpointId",
    "CompressedRequest",
    "Compression",
    "CompressionPolicy",
    "CopyStream",
    "DeferredMetadata",
    "DumpedObject",
    "FileAttributes",
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
    "PartialState",
    "SerializationFormat",
    "TensorPieces",
    "absolute_id",
    "absolute_id_for",
    "accelerator",
    "adopted",
    "allowed_globals",
    "archive_checked",
    "archive_quantized",
    "as_dtensor",
    "as_index",
    "as_metadata",
    "as_write_item",
    "box_view",
    "check_format",
    "check_memory",
    "children_of",
    "clone_tensor",
    "collector_paused",
    "columns_of",
    "combine_crcs",
    "contiguous",
    "copy_elements",
    "crc32",
    "described_like",
    "device_module",
    "devices_in_use",
    "dtensor_boxes",
    "dtensor_layout",
    "dump_object",
    "find_holders",
    "find_places",
    "flatten",
    "group_device",
    "holds_entry",
    "holds_shard",
    "how_to_allow",
    "in_shared_order",
    "is_dtensor",
    "is_plain",
    "is_quantized_dtype",
    "is_stateful",
    "is_wrapper",
    "library_logger",
    "load_object",
    "local_tensor",
    "module_command",
    "name_empty_mappings",
    "note_checkpoint_id",
    "note_rate",
    "on_this_stream",
    "one_setting",
    "outside_compile",
    "pin",
    "plain_values",
    "read_archive",
    "rebuilt",
    "reduce_exactly",
    "resolve_storage",
    "restore_empty_mappings",
    "same_value",
    "save_with",
    "scan",
    "set_up_save_planner",
    "shard_method",
    "suggest",
    "takes",
    "tensor_bytes",
    "tensor_payload",
    "unflatten_state_dict",
    "unwrapped",
    "value_bytes",
    "value_digest",
    "with_local",
    "with_rank_values",
    "with_states",
    "without_positional_path",
    "written_tensor",
]
