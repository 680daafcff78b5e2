"""Byte engine of checkpoints: stores, parallel verified reading and writing, torch-zip framing, durable publishing.

This package does not use torch. A new kind of storage implements `Store`, and `StoreBackend` saves and loads with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_base import import_lazily

if TYPE_CHECKING:
    from dcp_io.archives.crc import crc32
    from dcp_io.checkpoints.list_checkpoints import find_checkpoints, latest_valid
    from dcp_io.checkpoints.remove_checkpoint import remove_checkpoint
    from dcp_io.checkpoints.verify_checkpoint import VerifyReport, verify_checkpoint
    from dcp_io.engine import StoreBackend
    from dcp_io.errors import CheckpointExistsError, CheckpointReplacedError, SaveInProgressError, StorageError
    from dcp_io.lent_memory import LentMemory, MemoryLender, SupportsLending
    from dcp_io.requests import Layout, Payload, PiecewiseData, ReadRequest, Verify, Writable, WriteRequest
    from dcp_io.roots.keeping_rules import KeepAll, KeepBest, KeepEvery, KeepFor, KeepLast, KeepPolicy
    from dcp_io.roots.records import CheckpointRecord
    from dcp_io.saves.cleanup import STALE_AFTER_SECONDS
    from dcp_io.stores.host_store import HostStore
    from dcp_io.stores.local_store import LocalStore
    from dcp_io.stores.open_store import open_store
    from dcp_io.stores.root import Root
    from dcp_io.stores.store import (
        Entry,
        Place,
        RangeSink,
        RequestSource,
        Sink,
        Source,
        Store,
        SupportsFetch,
        SupportsFolders,
        SupportsPlace,
        SupportsRanges,
        SupportsReadAhead,
        SupportsReadSizes,
        check_name,
    )
    from dcp_manifest.file.index_problems import Problem

__all__ = [
    "STALE_AFTER_SECONDS",
    "CheckpointExistsError",
    "CheckpointRecord",
    "CheckpointReplacedError",
    "Entry",
    "HostStore",
    "KeepAll",
    "KeepBest",
    "KeepEvery",
    "KeepFor",
    "KeepLast",
    "KeepPolicy",
    "Layout",
    "LentMemory",
    "LocalStore",
    "MemoryLender",
    "Payload",
    "PiecewiseData",
    "Place",
    "Problem",
    "RangeSink",
    "ReadRequest",
    "RequestSource",
    "Root",
    "SaveInProgressError",
    "Sink",
    "Source",
    "StorageError",
    "Store",
    "StoreBackend",
    "SupportsFetch",
    "SupportsFolders",
    "SupportsLending",
    "SupportsPlace",
    "SupportsRanges",
    "SupportsReadAhead",
    "SupportsReadSizes",
    "Verify",
    "VerifyReport",
    "Writable",
    "WriteRequest",
    "check_name",
    "crc32",
    "find_checkpoints",
    "latest_valid",
    "open_store",
    "remove_checkpoint",
    "verify_checkpoint",
]

__getattr__, __dir__ = import_lazily(
    __name__,
    {
        "dcp_io.archives.crc": ("crc32",),
        "dcp_io.checkpoints.list_checkpoints": (
            "find_checkpoints",
            "latest_valid",
        ),
        "dcp_io.checkpoints.remove_checkpoint": ("remove_checkpoint",),
        "dcp_io.checkpoints.verify_checkpoint": (
            "VerifyReport",
            "verify_checkpoint",
        ),
        "dcp_io.engine": ("StoreBackend",),
        "dcp_io.errors": (
            "CheckpointExistsError",
            "CheckpointReplacedError",
            "SaveInProgressError",
            "StorageError",
        ),
        "dcp_io.lent_memory": (
            "LentMemory",
            "MemoryLender",
            "SupportsLending",
        ),
        "dcp_io.requests": (
            "Layout",
            "Payload",
            "PiecewiseData",
            "ReadRequest",
            "Verify",
            "Writable",
            "WriteRequest",
        ),
        "dcp_io.roots.keeping_rules": (
            "KeepAll",
            "KeepBest",
            "KeepEvery",
            "KeepFor",
            "KeepLast",
            "KeepPolicy",
        ),
        "dcp_io.roots.records": ("CheckpointRecord",),
        "dcp_io.saves.cleanup": ("STALE_AFTER_SECONDS",),
        "dcp_io.stores.host_store": ("HostStore",),
        "dcp_io.stores.local_store": ("LocalStore",),
        "dcp_io.stores.open_store": ("open_store",),
        "dcp_io.stores.root": ("Root",),
        "dcp_io.stores.store": (
            "Entry",
            "Place",
            "RangeSink",
            "RequestSource",
            "Sink",
            "Source",
            "Store",
            "SupportsFetch",
            "SupportsFolders",
            "SupportsPlace",
            "SupportsRanges",
            "SupportsReadAhead",
            "SupportsReadSizes",
            "check_name",
        ),
        "dcp_manifest.file.index_problems": ("Problem",),
    },
)
