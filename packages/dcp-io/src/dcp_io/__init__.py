"""Byte engine of checkpoints: stores, parallel verified reading and writing, torch-zip framing, durable publishing.

This package does not use torch. A new kind of storage implements `Store`, and `StoreBackend` saves and loads with it.
Names are imported on first use: a tool that only reads a checkpoint does not wait for the code that saves one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_hooks import import_lazily

if TYPE_CHECKING:
    from dcp_io.archives.archive_checks import ZipRecord, is_zip, record_crc32, verify_zip, zip_records
    from dcp_io.archives.archive_writer import ZipFileWriter
    from dcp_io.archives.crc import RunningCrc, crc32
    from dcp_io.archives.plain_object import read_plain_object
    from dcp_io.checkpoints.list_checkpoints import (
        FoundCheckpoint,
        ask_places,
        check_files,
        find_checkpoints,
        running_saves,
    )
    from dcp_io.checkpoints.newest_checkpoint import check_checkpoint, latest_valid
    from dcp_io.checkpoints.passing_crcs import PassingCrcs, spans_by_file
    from dcp_io.checkpoints.reader_leases import (
        READING_PREFIX,
        REMOVING,
        ReadingSign,
        announce_removal,
        is_dead_sign,
        live_readers,
    )
    from dcp_io.checkpoints.remove_checkpoint import checkpoint_files, clear_dead_saves, remove_checkpoint
    from dcp_io.checkpoints.verify_checkpoint import Problem, VerifyReport, verify_checkpoint
    from dcp_io.engine import StoreBackend
    from dcp_io.errors import (
        CheckpointExistsError,
        CheckpointReplacedError,
        NotAFolderError,
        SaveInProgressError,
        SaveLostError,
        StorageError,
        StoreNotFoundError,
    )
    from dcp_io.layout_choices import Layout, Verify, check_layout, check_verify
    from dcp_io.lent_memory import LentMemory, MemoryLender
    from dcp_io.memory_files import FileId, find_mapping, note_mapping
    from dcp_io.pace import Pace
    from dcp_io.reading.byte_ranges import range_of_values
    from dcp_io.reading.delivery import Delivery
    from dcp_io.reading.demands import Demands
    from dcp_io.reading.read_engine import read_items
    from dcp_io.recently_used import RecentlyUsed
    from dcp_io.requests import Payload, PiecewiseData, ReadRequest, ReadStats, Writable, WriteRequest
    from dcp_io.roots.catalogue import Catalogue, StepFolder
    from dcp_io.roots.copy_notes import CopyNote, newest_protected, read_copy_note, write_copy_note
    from dcp_io.roots.host_copies import CopyRequest, HostCopies, HostsCopied
    from dcp_io.roots.host_ids import host_id, hosts_of_job, note_hosts
    from dcp_io.roots.keeping_rules import (
        KeepAll,
        KeepAny,
        KeepBest,
        KeepEvery,
        KeepFor,
        KeepLast,
        KeepPolicy,
        keeps_all,
    )
    from dcp_io.roots.policy_text import parse_policy, policy_text
    from dcp_io.roots.promoting_root import PromotingRoot
    from dcp_io.roots.records import CheckpointRecord, by_creation
    from dcp_io.roots.unfinished import Unfinished
    from dcp_io.saves.current_checkpoint import Current, read_current
    from dcp_io.saves.marker_owner import ProcessIdentity, is_gone, this_process
    from dcp_io.saves.own_files import is_own_file, temporary_of
    from dcp_io.saves.save_session import STALE_AFTER_SECONDS, SaveSession
    from dcp_io.stores.host_store import HostFolder, HostStore, host_uri, split_also, with_also
    from dcp_io.stores.local_store import LocalStore
    from dcp_io.stores.open_store import file_at, open_store, scheme_of
    from dcp_io.stores.retries import Attempts, TruncatedError
    from dcp_io.stores.root import Root, places_of, root_at
    from dcp_io.stores.store import (
        SHARED_BLOCK_BYTES,
        TEMPORARY_SUFFIX,
        Entry,
        Place,
        RangeSink,
        Sink,
        Source,
        Store,
        check_name,
    )
    from dcp_io.stores.stream_files import StreamFileSystem
    from dcp_io.stores.stream_store import StreamStore
    from dcp_io.stores.upload_sink import UploadSink
    from dcp_io.timed_call import TimedCall, call_in_time
    from dcp_io.writing.write_engine import write_items

__all__ = [
    "READING_PREFIX",
    "REMOVING",
    "SHARED_BLOCK_BYTES",
    "STALE_AFTER_SECONDS",
    "TEMPORARY_SUFFIX",
    "Attempts",
    "Catalogue",
    "CheckpointExistsError",
    "CheckpointRecord",
    "CheckpointReplacedError",
    "CopyNote",
    "CopyRequest",
    "Current",
    "Delivery",
    "Demands",
    "Entry",
    "FileId",
    "FoundCheckpoint",
    "HostCopies",
    "HostFolder",
    "HostStore",
    "HostsCopied",
    "KeepAll",
    "KeepAny",
    "KeepBest",
    "KeepEvery",
    "KeepFor",
    "KeepLast",
    "KeepPolicy",
    "Layout",
    "LentMemory",
    "LocalStore",
    "MemoryLender",
    "NotAFolderError",
    "Pace",
    "PassingCrcs",
    "Payload",
    "PiecewiseData",
    "Place",
    "Problem",
    "ProcessIdentity",
    "PromotingRoot",
    "RangeSink",
    "ReadRequest",
    "ReadStats",
    "ReadingSign",
    "RecentlyUsed",
    "Root",
    "RunningCrc",
    "SaveInProgressError",
    "SaveLostError",
    "SaveSession",
    "Sink",
    "Source",
    "StepFolder",
    "StorageError",
    "Store",
    "StoreBackend",
    "StoreNotFoundError",
    "StreamFileSystem",
    "StreamStore",
    "TimedCall",
    "TruncatedError",
    "Unfinished",
    "UploadSink",
    "Verify",
    "VerifyReport",
    "Writable",
    "WriteRequest",
    "ZipFileWriter",
    "ZipRecord",
    "announce_removal",
    "ask_places",
    "by_creation",
    "call_in_time",
    "check_checkpoint",
    "check_files",
    "check_layout",
    "check_name",
    "check_verify",
    "checkpoint_files",
    "clear_dead_saves",
    "crc32",
    "file_at",
    "find_checkpoints",
    "find_mapping",
    "host_id",
    "host_uri",
    "hosts_of_job",
    "is_dead_sign",
    "is_gone",
    "is_own_file",
    "is_zip",
    "keeps_all",
    "latest_valid",
    "live_readers",
    "newest_protected",
    "note_hosts",
    "note_mapping",
    "open_store",
    "parse_policy",
    "places_of",
    "policy_text",
    "range_of_values",
    "read_copy_note",
    "read_current",
    "read_items",
    "read_plain_object",
    "record_crc32",
    "remove_checkpoint",
    "root_at",
    "running_saves",
    "scheme_of",
    "spans_by_file",
    "split_also",
    "temporary_of",
    "this_process",
    "verify_checkpoint",
    "verify_zip",
    "with_also",
    "write_copy_note",
    "write_items",
    "zip_records",
]

__getattr__, __dir__ = import_lazily(
    __name__,
    {
        "dcp_io.archives.archive_checks": ("ZipRecord", "is_zip", "record_crc32", "verify_zip", "zip_records"),
        "dcp_io.archives.archive_writer": ("ZipFileWriter",),
        "dcp_io.archives.crc": ("RunningCrc", "crc32"),
        "dcp_io.archives.plain_object": ("read_plain_object",),
        "dcp_io.checkpoints.list_checkpoints": (
            "FoundCheckpoint",
            "ask_places",
            "check_files",
            "find_checkpoints",
            "running_saves",
        ),
        "dcp_io.checkpoints.passing_crcs": ("PassingCrcs", "spans_by_file"),
        "dcp_io.checkpoints.newest_checkpoint": ("check_checkpoint", "latest_valid"),
        "dcp_io.checkpoints.reader_leases": (
            "READING_PREFIX",
            "REMOVING",
            "ReadingSign",
            "announce_removal",
            "is_dead_sign",
            "live_readers",
        ),
        "dcp_io.checkpoints.remove_checkpoint": ("checkpoint_files", "clear_dead_saves", "remove_checkpoint"),
        "dcp_io.checkpoints.verify_checkpoint": ("Problem", "VerifyReport", "verify_checkpoint"),
        "dcp_io.engine": ("StoreBackend",),
        "dcp_io.errors": (
            "CheckpointExistsError",
            "CheckpointReplacedError",
            "NotAFolderError",
            "SaveInProgressError",
            "SaveLostError",
            "StorageError",
            "StoreNotFoundError",
        ),
        "dcp_io.layout_choices": ("Layout", "Verify", "check_layout", "check_verify"),
        "dcp_io.lent_memory": ("LentMemory", "MemoryLender"),
        "dcp_io.memory_files": ("FileId", "find_mapping", "note_mapping"),
        "dcp_io.reading.byte_ranges": ("range_of_values",),
        "dcp_io.reading.delivery": ("Delivery",),
        "dcp_io.reading.demands": ("Demands",),
        "dcp_io.reading.read_engine": ("read_items",),
        "dcp_io.recently_used": ("RecentlyUsed",),
        "dcp_io.requests": ("Payload", "PiecewiseData", "ReadRequest", "ReadStats", "Writable", "WriteRequest"),
        "dcp_io.pace": ("Pace",),
        "dcp_io.roots.copy_notes": ("CopyNote", "newest_protected", "read_copy_note", "write_copy_note"),
        "dcp_io.roots.host_copies": ("CopyRequest", "HostCopies", "HostsCopied"),
        "dcp_io.roots.host_ids": ("host_id", "hosts_of_job", "note_hosts"),
        "dcp_io.roots.catalogue": ("Catalogue", "StepFolder"),
        "dcp_io.roots.keeping_rules": (
            "KeepAll",
            "KeepAny",
            "KeepBest",
            "KeepEvery",
            "KeepFor",
            "KeepLast",
            "KeepPolicy",
            "keeps_all",
        ),
        "dcp_io.roots.policy_text": ("parse_policy", "policy_text"),
        "dcp_io.roots.promoting_root": ("PromotingRoot",),
        "dcp_io.roots.records": ("CheckpointRecord", "by_creation"),
        "dcp_io.roots.unfinished": ("Unfinished",),
        "dcp_io.saves.current_checkpoint": ("Current", "read_current"),
        "dcp_io.saves.marker_owner": ("ProcessIdentity", "is_gone", "this_process"),
        "dcp_io.saves.own_files": ("is_own_file", "temporary_of"),
        "dcp_io.saves.save_session": ("STALE_AFTER_SECONDS", "SaveSession"),
        "dcp_io.stores.host_store": ("HostFolder", "HostStore", "host_uri", "split_also", "with_also"),
        "dcp_io.stores.local_store": ("LocalStore",),
        "dcp_io.stores.open_store": ("file_at", "open_store", "scheme_of"),
        "dcp_io.stores.root": ("Root", "places_of", "root_at"),
        "dcp_io.stores.retries": ("Attempts", "TruncatedError"),
        "dcp_io.stores.store": (
            *("SHARED_BLOCK_BYTES", "TEMPORARY_SUFFIX", "Entry", "Place", "RangeSink", "Sink", "Source", "Store"),
            "check_name",
        ),
        "dcp_io.stores.stream_files": ("StreamFileSystem",),
        "dcp_io.stores.stream_store": ("StreamStore",),
        "dcp_io.timed_call": ("TimedCall", "call_in_time"),
        "dcp_io.stores.upload_sink": ("UploadSink",),
        "dcp_io.writing.write_engine": ("write_items",),
    },
)
