"""Byte engine of checkpoints: stores, parallel verified reading and writing, torch-zip framing, durable publishing.

This package does not use torch. A new kind of storage implements `Store`, and `StoreBackend` saves and loads with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_base import import_lazily

if TYPE_CHECKING:
    from dcp_io.archives.crc import crc32 as crc32
    from dcp_io.checkpoints.list_checkpoints import find_checkpoints as find_checkpoints
    from dcp_io.checkpoints.list_checkpoints import latest_valid as latest_valid
    from dcp_io.checkpoints.remove_checkpoint import remove_checkpoint as remove_checkpoint
    from dcp_io.checkpoints.verify_checkpoint import VerifyReport as VerifyReport
    from dcp_io.checkpoints.verify_checkpoint import verify_checkpoint as verify_checkpoint
    from dcp_io.engine import StoreBackend as StoreBackend
    from dcp_io.errors import CheckpointExistsError as CheckpointExistsError
    from dcp_io.errors import CheckpointReplacedError as CheckpointReplacedError
    from dcp_io.errors import SaveInProgressError as SaveInProgressError
    from dcp_io.errors import StorageError as StorageError
    from dcp_io.lent_memory import LentMemory as LentMemory
    from dcp_io.lent_memory import MemoryLender as MemoryLender
    from dcp_io.lent_memory import SupportsLending as SupportsLending
    from dcp_io.requests import Layout as Layout
    from dcp_io.requests import Payload as Payload
    from dcp_io.requests import PiecewiseData as PiecewiseData
    from dcp_io.requests import ReadRequest as ReadRequest
    from dcp_io.requests import Verify as Verify
    from dcp_io.requests import Writable as Writable
    from dcp_io.requests import WriteRequest as WriteRequest
    from dcp_io.roots.keeping_rules import KeepAll as KeepAll
    from dcp_io.roots.keeping_rules import KeepBest as KeepBest
    from dcp_io.roots.keeping_rules import KeepEvery as KeepEvery
    from dcp_io.roots.keeping_rules import KeepFor as KeepFor
    from dcp_io.roots.keeping_rules import KeepLast as KeepLast
    from dcp_io.roots.keeping_rules import KeepPolicy as KeepPolicy
    from dcp_io.roots.records import CheckpointRecord as CheckpointRecord
    from dcp_io.saves.cleanup import STALE_AFTER_SECONDS as STALE_AFTER_SECONDS
    from dcp_io.stores.host_store import HostStore as HostStore
    from dcp_io.stores.local_store import LocalStore as LocalStore
    from dcp_io.stores.open_store import open_store as open_store
    from dcp_io.stores.root import Root as Root
    from dcp_io.stores.store import Entry as Entry
    from dcp_io.stores.store import Place as Place
    from dcp_io.stores.store import RangeSink as RangeSink
    from dcp_io.stores.store import RequestSource as RequestSource
    from dcp_io.stores.store import Sink as Sink
    from dcp_io.stores.store import Source as Source
    from dcp_io.stores.store import Store as Store
    from dcp_io.stores.store import SupportsFetch as SupportsFetch
    from dcp_io.stores.store import SupportsFolders as SupportsFolders
    from dcp_io.stores.store import SupportsPlace as SupportsPlace
    from dcp_io.stores.store import SupportsRanges as SupportsRanges
    from dcp_io.stores.store import SupportsReadAhead as SupportsReadAhead
    from dcp_io.stores.store import SupportsReadSizes as SupportsReadSizes
    from dcp_io.stores.store import check_name as check_name
    from dcp_manifest.file.index_problems import Problem as Problem

__getattr__, __dir__ = import_lazily(
    __name__,
    {
        "dcp_io.archives.crc": ("crc32",),
        "dcp_io.checkpoints.list_checkpoints": ("find_checkpoints", "latest_valid"),
        "dcp_io.checkpoints.remove_checkpoint": ("remove_checkpoint",),
        "dcp_io.checkpoints.verify_checkpoint": ("VerifyReport", "verify_checkpoint"),
        "dcp_io.engine": ("StoreBackend",),
        "dcp_io.errors": ("CheckpointExistsError", "CheckpointReplacedError", "SaveInProgressError", "StorageError"),
        "dcp_io.lent_memory": ("LentMemory", "MemoryLender", "SupportsLending"),
        "dcp_io.requests": ("Layout", "Payload", "PiecewiseData", "ReadRequest", "Verify", "Writable", "WriteRequest"),
        "dcp_io.roots.keeping_rules": ("KeepAll", "KeepBest", "KeepEvery", "KeepFor", "KeepLast", "KeepPolicy"),
        "dcp_io.roots.records": ("CheckpointRecord",),
        "dcp_io.saves.cleanup": ("STALE_AFTER_SECONDS",),
        "dcp_io.stores.host_store": ("HostStore",),
        "dcp_io.stores.local_store": ("LocalStore",),
        "dcp_io.stores.open_store": ("open_store",),
        "dcp_io.stores.root": ("Root",),
        "dcp_io.stores.store": (
            *("Entry", "Place", "RangeSink", "RequestSource", "Sink", "Source", "Store", "SupportsFetch"),
            *("SupportsFolders", "SupportsPlace", "SupportsRanges", "SupportsReadAhead", "SupportsReadSizes"),
            "check_name",
        ),
        "dcp_manifest.file.index_problems": ("Problem",),
    },
)
