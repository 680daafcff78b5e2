"""Byte engine of checkpoints: stores, parallel verified reading and writing, torch-zip framing, durable publishing.

This package does not use torch. A new kind of storage implements `Store`, and `StoreBackend` saves and loads with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_base import import_lazily

if TYPE_CHECKING:
    from dcp_io.archives.archive_checks import ZipRecord, zip_records
    from dcp_io.archives.crc import crc32
    from dcp_io.archives.stored_objects import outline_of_tensor, read_plain_object
    from dcp_io.archives.zip_format import ZipFileWriter, is_zip
    from dcp_io.checkpoints.list_checkpoints import (
        check_files,
        find_checkpoints,
        latest_valid,
        running_saves,
    )
    from dcp_io.checkpoints.remove_checkpoint import (
        REMOVING,
        ReadingSign,
        checkpoint_files,
        clear_dead_saves,
        remove_checkpoint,
    )
    from dcp_io.checkpoints.verify_checkpoint import PassingCrcs, Problem, VerifyReport, verify_checkpoint
    from dcp_io.engine import StoreBackend
    from dcp_io.errors import CheckpointExistsError, CheckpointReplacedError, SaveInProgressError, StorageError
    from dcp_io.lent_memory import FileId, LentMemory, MemoryLender, SupportsLending, lender_of
    from dcp_io.reading.crc_checks import Demands
    from dcp_io.reading.delivery import Delivery
    from dcp_io.reading.read_engine import read_items
    from dcp_io.reading.read_plan import ReadSizes, range_of_values
    from dcp_io.recently_used import RecentlyUsed
    from dcp_io.requests import (
        Layout,
        Payload,
        PiecewiseData,
        ReadRequest,
        ReadStats,
        Verify,
        Writable,
        WriteRequest,
        check_choices,
    )
    from dcp_io.roots.catalogue import Catalogue, PromotingRoot, StepFolder
    from dcp_io.roots.copy_notes import CopyNote, CopyRequest, HostCopies, HostsCopied, JobHosts
    from dcp_io.roots.keeping_rules import KeepAll, KeepBest, KeepEvery, KeepFor, KeepLast, KeepPolicy
    from dcp_io.roots.records import CheckpointRecord, read_note
    from dcp_io.roots.unfinished import Unfinished
    from dcp_io.saves.cleanup import index_digest, read_current
    from dcp_io.saves.save_files import ProcessIdentity, temporary_of, this_process
    from dcp_io.saves.save_session import STALE_AFTER_SECONDS, RankSaveSession, SaveSession
    from dcp_io.stores.host_store import HostFolder, HostStore
    from dcp_io.stores.local_store import LocalStore
    from dcp_io.stores.open_store import file_at, open_store
    from dcp_io.stores.root import Root, places_of, root_at
    from dcp_io.stores.store import (
        TEMPORARY_SUFFIX,
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
    from dcp_io.stores.stream_files import Attempts, UploadSink
    from dcp_io.stores.stream_store import StreamStore
    from dcp_io.timed_call import Pace, TimedCall
    from dcp_io.workers import check_stop

__all__ = [
    "REMOVING",
    "STALE_AFTER_SECONDS",
    "TEMPORARY_SUFFIX",
    "Attempts",
    "Catalogue",
    "CheckpointExistsError",
    "CheckpointRecord",
    "CheckpointReplacedError",
    "CopyNote",
    "CopyRequest",
    "Delivery",
    "Demands",
    "Entry",
    "FileId",
    "HostCopies",
    "HostFolder",
    "HostStore",
    "HostsCopied",
    "JobHosts",
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
    "Pace",
    "PassingCrcs",
    "Payload",
    "PiecewiseData",
    "Place",
    "Problem",
    "ProcessIdentity",
    "PromotingRoot",
    "RangeSink",
    "RankSaveSession",
    "ReadRequest",
    "ReadSizes",
    "ReadStats",
    "ReadingSign",
    "RecentlyUsed",
    "RequestSource",
    "Root",
    "SaveInProgressError",
    "SaveSession",
    "Sink",
    "Source",
    "StepFolder",
    "StorageError",
    "Store",
    "StoreBackend",
    "StreamStore",
    "SupportsFetch",
    "SupportsFolders",
    "SupportsLending",
    "SupportsPlace",
    "SupportsRanges",
    "SupportsReadAhead",
    "SupportsReadSizes",
    "TimedCall",
    "Unfinished",
    "UploadSink",
    "Verify",
    "VerifyReport",
    "Writable",
    "WriteRequest",
    "ZipFileWriter",
    "ZipRecord",
    "check_choices",
    "check_files",
    "check_name",
    "check_stop",
    "checkpoint_files",
    "clear_dead_saves",
    "crc32",
    "file_at",
    "find_checkpoints",
    "index_digest",
    "is_zip",
    "latest_valid",
    "lender_of",
    "open_store",
    "outline_of_tensor",
    "places_of",
    "range_of_values",
    "read_current",
    "read_items",
    "read_note",
    "read_plain_object",
    "remove_checkpoint",
    "root_at",
    "running_saves",
    "temporary_of",
    "this_process",
    "verify_checkpoint",
    "zip_records",
]

__getattr__, __dir__ = import_lazily(
    __name__,
    {
        "dcp_io.archives.archive_checks": ("ZipRecord", "zip_records"),
        "dcp_io.archives.crc": ("crc32",),
        "dcp_io.archives.stored_objects": ("outline_of_tensor", "read_plain_object"),
        "dcp_io.archives.zip_format": ("ZipFileWriter", "is_zip"),
        "dcp_io.checkpoints.list_checkpoints": (
            "check_files",
            "find_checkpoints",
            "latest_valid",
            "running_saves",
        ),
        "dcp_io.checkpoints.remove_checkpoint": (
            "REMOVING",
            "ReadingSign",
            "checkpoint_files",
            "clear_dead_saves",
            "remove_checkpoint",
        ),
        "dcp_io.checkpoints.verify_checkpoint": ("PassingCrcs", "Problem", "VerifyReport", "verify_checkpoint"),
        "dcp_io.engine": ("StoreBackend",),
        "dcp_io.errors": ("CheckpointExistsError", "CheckpointReplacedError", "SaveInProgressError", "StorageError"),
        "dcp_io.lent_memory": ("FileId", "LentMemory", "MemoryLender", "SupportsLending", "lender_of"),
        "dcp_io.reading.crc_checks": ("Demands",),
        "dcp_io.reading.delivery": ("Delivery",),
        "dcp_io.reading.read_engine": ("read_items",),
        "dcp_io.reading.read_plan": ("ReadSizes", "range_of_values"),
        "dcp_io.recently_used": ("RecentlyUsed",),
        "dcp_io.requests": (
            "Layout",
            "Payload",
            "PiecewiseData",
            "ReadRequest",
            "ReadStats",
            "Verify",
            "Writable",
            "WriteRequest",
            "check_choices",
        ),
        "dcp_io.roots.catalogue": ("Catalogue", "PromotingRoot", "StepFolder"),
        "dcp_io.roots.copy_notes": ("CopyNote", "CopyRequest", "HostCopies", "HostsCopied", "JobHosts"),
        "dcp_io.roots.keeping_rules": ("KeepAll", "KeepBest", "KeepEvery", "KeepFor", "KeepLast", "KeepPolicy"),
        "dcp_io.roots.records": ("CheckpointRecord", "read_note"),
        "dcp_io.roots.unfinished": ("Unfinished",),
        "dcp_io.saves.cleanup": ("index_digest", "read_current"),
        "dcp_io.saves.save_files": ("ProcessIdentity", "temporary_of", "this_process"),
        "dcp_io.saves.save_session": ("STALE_AFTER_SECONDS", "RankSaveSession", "SaveSession"),
        "dcp_io.stores.host_store": ("HostFolder", "HostStore"),
        "dcp_io.stores.local_store": ("LocalStore",),
        "dcp_io.stores.open_store": ("file_at", "open_store"),
        "dcp_io.stores.root": ("Root", "places_of", "root_at"),
        "dcp_io.stores.store": (
            "TEMPORARY_SUFFIX",
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
        "dcp_io.stores.stream_files": ("Attempts", "UploadSink"),
        "dcp_io.stores.stream_store": ("StreamStore",),
        "dcp_io.timed_call": ("Pace", "TimedCall"),
        "dcp_io.workers": ("check_stop",),
    },
)
