"""All public names of the project under one import: `import dcp_all as dcp`.

Names and modules are those of `torch.distributed.checkpoint`: to migrate a script, change its import line. Re-exports
only, which are imported when they are first used; each name is documented where it is defined.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_base import import_lazily

if TYPE_CHECKING:
    from dcp_all import api as api
    from dcp_all import default_planner as default_planner
    from dcp_all import filesystem as filesystem
    from dcp_all import format_utils as format_utils
    from dcp_all import fsspec_filesystem as fsspec_filesystem
    from dcp_all import hf_storage as hf_storage
    from dcp_all import logger as logger
    from dcp_all import logging_handlers as logging_handlers
    from dcp_all import metadata as metadata
    from dcp_all import optimizer as optimizer
    from dcp_all import planner as planner
    from dcp_all import planner_helpers as planner_helpers
    from dcp_all import protocol as protocol
    from dcp_all import quantized_hf_storage as quantized_hf_storage
    from dcp_all import resharding as resharding
    from dcp_all import staging as staging
    from dcp_all import state_dict as state_dict
    from dcp_all import state_dict_loader as state_dict_loader
    from dcp_all import state_dict_saver as state_dict_saver
    from dcp_all import stateful as stateful
    from dcp_all import storage as storage
    from dcp_all import utils as utils
    from dcp_async import AsyncCheckpointerType as AsyncCheckpointerType
    from dcp_async import AsyncSaver as AsyncSaver
    from dcp_async import AsyncSaveResponse as AsyncSaveResponse
    from dcp_async import SaverOptions as SaverOptions
    from dcp_async import SaveSkippedError as SaveSkippedError
    from dcp_async import WorkerLostError as WorkerLostError
    from dcp_async import WorkerOptions as WorkerOptions
    from dcp_async import async_save as async_save
    from dcp_bridge import replace_stock as replace_stock
    from dcp_core import BytesStorageMetadata as BytesStorageMetadata
    from dcp_core import CheckpointException as CheckpointException
    from dcp_core import CheckpointNotFoundError as CheckpointNotFoundError
    from dcp_core import ChunkStorageMetadata as ChunkStorageMetadata
    from dcp_core import CorruptCheckpointError as CorruptCheckpointError
    from dcp_core import DcpError as DcpError
    from dcp_core import DefaultLoadPlanner as DefaultLoadPlanner
    from dcp_core import DefaultSavePlanner as DefaultSavePlanner
    from dcp_core import Estimate as Estimate
    from dcp_core import LoadMismatchError as LoadMismatchError
    from dcp_core import LoadPlan as LoadPlan
    from dcp_core import LoadPlanner as LoadPlanner
    from dcp_core import LoadReport as LoadReport
    from dcp_core import Metadata as Metadata
    from dcp_core import PeerLostError as PeerLostError
    from dcp_core import PerRank as PerRank
    from dcp_core import ReadItem as ReadItem
    from dcp_core import SavePlan as SavePlan
    from dcp_core import SavePlanner as SavePlanner
    from dcp_core import Stateful as Stateful
    from dcp_core import StorageReader as StorageReader
    from dcp_core import StorageWriter as StorageWriter
    from dcp_core import TensorStorageMetadata as TensorStorageMetadata
    from dcp_core import UnsafeCheckpointError as UnsafeCheckpointError
    from dcp_core import UnsupportedFormatError as UnsupportedFormatError
    from dcp_core import WriteItem as WriteItem
    from dcp_core import estimate as estimate
    from dcp_core import load as load
    from dcp_core import load_keys as load_keys
    from dcp_core import load_state_dict as load_state_dict
    from dcp_core import plugins as plugins
    from dcp_core import save as save
    from dcp_core import save_state_dict as save_state_dict
    from dcp_core.shards.boxes import CheckpointableTensor as CheckpointableTensor
    from dcp_data import ResumableLoader as ResumableLoader
    from dcp_data import ResumableSampler as ResumableSampler
    from dcp_data import ResumableStream as ResumableStream
    from dcp_exchange import ExchangeError as ExchangeError
    from dcp_format import Conversion as Conversion
    from dcp_format import HuggingFaceStorageReader as HuggingFaceStorageReader
    from dcp_format import HuggingFaceStorageWriter as HuggingFaceStorageWriter
    from dcp_format import QuantizedHuggingFaceStorageReader as QuantizedHuggingFaceStorageReader
    from dcp_format import SafetensorsWriter as SafetensorsWriter
    from dcp_format import convert as convert
    from dcp_format import save_safetensors as save_safetensors
    from dcp_fs import FileSystemReader as FileSystemReader
    from dcp_fs import FileSystemWriter as FileSystemWriter
    from dcp_fsspec import FsspecReader as FsspecReader
    from dcp_fsspec import FsspecWriter as FsspecWriter
    from dcp_inspect import run
    from dcp_inspect import show_progress as show_progress
    from dcp_inspect import visualize as visualize
    from dcp_io import SaveInProgressError as SaveInProgressError
    from dcp_io import StorageError as StorageError
    from dcp_io import find_checkpoints as find_checkpoints
    from dcp_io import latest_valid as latest_valid
    from dcp_io import open_store as open_store
    from dcp_io import verify_checkpoint as verify_checkpoint
    from dcp_manager import CheckpointManager as CheckpointManager
    from dcp_manager import EverySeconds as EverySeconds
    from dcp_manager import EverySteps as EverySteps
    from dcp_manager import KeepAll as KeepAll
    from dcp_manager import KeepBest as KeepBest
    from dcp_manager import KeepEvery as KeepEvery
    from dcp_manager import KeepFor as KeepFor
    from dcp_manager import KeepLast as KeepLast
    from dcp_manager import OnRequest as OnRequest
    from dcp_manager import OnSignal as OnSignal
    from dcp_manager import preflight as preflight
    from dcp_memory import keeper_status as keeper_status
    from dcp_memory import partner as partner
    from dcp_memory import start_keeper as start_keeper
    from dcp_memory import stop_keeper as stop_keeper
    from dcp_object import ObjectStoreReader as ObjectStoreReader
    from dcp_object import ObjectStoreWriter as ObjectStoreWriter
    from dcp_prove import prove_resume as prove_resume
    from dcp_ranks import PeerOptions as PeerOptions
    from dcp_state import RandomState as RandomState
    from dcp_state import StateMismatchError as StateMismatchError
    from dcp_state import TrainableOnly as TrainableOnly
    from dcp_state import app_state as app_state
    from dcp_state import load_sharded_optimizer_state_dict as load_sharded_optimizer_state_dict
    from dcp_tiers import KeepWaiting as KeepWaiting
    from dcp_tiers import Tier as Tier
    from dcp_tiers import Tiers as Tiers

    run_command = run

__getattr__, __dir__ = import_lazily(
    __name__,
    {
        "dcp_all": (
            *("api", "default_planner", "filesystem", "format_utils", "fsspec_filesystem", "hf_storage", "logger"),
            *("logging_handlers", "metadata", "optimizer", "planner", "planner_helpers", "protocol"),
            *("quantized_hf_storage", "resharding", "staging", "state_dict", "state_dict_loader", "state_dict_saver"),
            *("stateful", "storage", "utils"),
        ),
        "dcp_async": (
            *("AsyncCheckpointerType", "AsyncSaver", "AsyncSaveResponse", "SaverOptions", "SaveSkippedError"),
            *("WorkerLostError", "WorkerOptions", "async_save"),
        ),
        "dcp_bridge": ("replace_stock",),
        "dcp_core": (
            *("BytesStorageMetadata", "CheckpointException", "CheckpointNotFoundError", "ChunkStorageMetadata"),
            *("CorruptCheckpointError", "DcpError", "DefaultLoadPlanner", "DefaultSavePlanner", "Estimate"),
            *("LoadMismatchError", "LoadPlan", "LoadPlanner", "LoadReport", "Metadata", "PeerLostError", "PerRank"),
            *("ReadItem", "SavePlan", "SavePlanner", "Stateful", "StorageReader", "StorageWriter"),
            *("TensorStorageMetadata", "UnsafeCheckpointError", "UnsupportedFormatError", "WriteItem", "estimate"),
            *("load", "load_keys", "load_state_dict", "plugins", "save", "save_state_dict"),
        ),
        "dcp_core.shards.boxes": ("CheckpointableTensor",),
        "dcp_data": ("ResumableLoader", "ResumableSampler", "ResumableStream"),
        "dcp_exchange": ("ExchangeError",),
        "dcp_memory": ("keeper_status", "partner", "start_keeper", "stop_keeper"),
        "dcp_prove": ("prove_resume",),
        "dcp_tiers": ("KeepWaiting", "Tier", "Tiers"),
        "dcp_format": (
            *("Conversion", "HuggingFaceStorageReader", "HuggingFaceStorageWriter"),
            *("QuantizedHuggingFaceStorageReader", "SafetensorsWriter", "convert", "save_safetensors"),
        ),
        "dcp_fs": ("FileSystemReader", "FileSystemWriter"),
        "dcp_fsspec": ("FsspecReader", "FsspecWriter"),
        "dcp_inspect": ("run as run_command", "show_progress", "visualize"),
        "dcp_io": (
            *("verify_checkpoint", "SaveInProgressError", "StorageError", "find_checkpoints", "latest_valid"),
            "open_store",
        ),
        "dcp_manager": (
            *("CheckpointManager", "EverySeconds", "EverySteps", "KeepAll", "KeepBest", "KeepEvery", "KeepFor"),
            *("KeepLast", "OnRequest", "OnSignal", "preflight"),
        ),
        "dcp_object": ("ObjectStoreReader", "ObjectStoreWriter"),
        "dcp_ranks": ("PeerOptions",),
        "dcp_state": (
            *("RandomState", "StateMismatchError", "TrainableOnly", "app_state", "load_sharded_optimizer_state_dict"),
        ),
    },
)
