"""Bytes of checkpoints: stores, parallel verified reading and writing, torch-zip framing, durable publishing.

No tensors and no torch here. A new kind of storage implements `Store`; `StoreBackend` does everything else over it.
Names are imported when they are first asked for: who only looks at a checkpoint does not wait for what saves one.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcp_io.attempts import Attempts, TruncatedError
    from dcp_io.backend import StoreBackend
    from dcp_io.choices import Layout, Verify, check_layout, check_verify
    from dcp_io.coverage import coverage_problems
    from dcp_io.crc import RunningCrc, combine, crc32, running_crcs
    from dcp_io.current import Current, read_current
    from dcp_io.errors import (
        CheckpointExistsError,
        CheckpointReplacedError,
        SaveInProgressError,
        SaveLostError,
        StorageError,
        StoreNotFoundError,
    )
    from dcp_io.folders import FoundCheckpoint, check_files, find_checkpoints, running_saves
    from dcp_io.latest import check_checkpoint, latest_valid
    from dcp_io.local import LocalStore
    from dcp_io.opening import file_at, open_store, scheme_of
    from dcp_io.own_files import is_own_file, temporary_of
    from dcp_io.process_identity import ProcessIdentity, is_gone, this_process
    from dcp_io.ranges import align_to_blocks, merge_ranges, split_range
    from dcp_io.read_engine import read_items
    from dcp_io.reading_signs import READING_PREFIX, REMOVING, ReadingSign, announce_removal, is_dead_sign, live_readers
    from dcp_io.removal import checkpoint_files, clear_dead_saves, remove_checkpoint
    from dcp_io.saves import STALE_AFTER_SECONDS, SaveSession, new_save_id
    from dcp_io.store import TEMPORARY_SUFFIX, Entry, Sink, Source, Store, check_name
    from dcp_io.stream_files import StreamFileSystem
    from dcp_io.stream_store import StreamStore
    from dcp_io.upload_sink import UploadSink
    from dcp_io.verify import Problem, VerifyReport, verify_checkpoint
    from dcp_io.write_engine import DATA_SUFFIX, write_items
    from dcp_io.zip_check import ZipRecord, is_zip, record_crc32, verify_zip, zip_records
    from dcp_io.zip_file import ZipFileWriter
    from dcp_io.zip_payload import Frame, tensor_frame

__all__ = [
    "DATA_SUFFIX",
    "READING_PREFIX",
    "REMOVING",
    "STALE_AFTER_SECONDS",
    "TEMPORARY_SUFFIX",
    "Attempts",
    "CheckpointExistsError",
    "CheckpointReplacedError",
    "Current",
    "Entry",
    "FoundCheckpoint",
    "Frame",
    "Layout",
    "LocalStore",
    "Problem",
    "ProcessIdentity",
    "ReadingSign",
    "RunningCrc",
    "SaveInProgressError",
    "SaveLostError",
    "SaveSession",
    "Sink",
    "Source",
    "StorageError",
    "Store",
    "StoreBackend",
    "StoreNotFoundError",
    "StreamFileSystem",
    "StreamStore",
    "TruncatedError",
    "UploadSink",
    "Verify",
    "VerifyReport",
    "ZipFileWriter",
    "ZipRecord",
    "align_to_blocks",
    "announce_removal",
    "check_checkpoint",
    "check_files",
    "check_layout",
    "check_name",
    "check_verify",
    "checkpoint_files",
    "clear_dead_saves",
    "combine",
    "coverage_problems",
    "crc32",
    "file_at",
    "find_checkpoints",
    "is_dead_sign",
    "is_gone",
    "is_own_file",
    "is_zip",
    "latest_valid",
    "live_readers",
    "merge_ranges",
    "new_save_id",
    "open_store",
    "read_current",
    "read_items",
    "record_crc32",
    "remove_checkpoint",
    "running_crcs",
    "running_saves",
    "scheme_of",
    "split_range",
    "temporary_of",
    "tensor_frame",
    "this_process",
    "verify_checkpoint",
    "verify_zip",
    "write_items",
    "zip_records",
]

_HOMES = {
    "attempts": (
        "Attempts",
        "TruncatedError",
    ),
    "backend": ("StoreBackend",),
    "choices": (
        "Layout",
        "Verify",
        "check_layout",
        "check_verify",
    ),
    "coverage": ("coverage_problems",),
    "crc": (
        "RunningCrc",
        "combine",
        "crc32",
        "running_crcs",
    ),
    "current": (
        "Current",
        "read_current",
    ),
    "errors": (
        "CheckpointExistsError",
        "CheckpointReplacedError",
        "SaveInProgressError",
        "SaveLostError",
        "StorageError",
        "StoreNotFoundError",
    ),
    "folders": (
        "FoundCheckpoint",
        "check_files",
        "find_checkpoints",
        "running_saves",
    ),
    "latest": (
        "check_checkpoint",
        "latest_valid",
    ),
    "local": ("LocalStore",),
    "opening": (
        "file_at",
        "open_store",
        "scheme_of",
    ),
    "process_identity": (
        "ProcessIdentity",
        "is_gone",
        "this_process",
    ),
    "ranges": (
        "align_to_blocks",
        "merge_ranges",
        "split_range",
    ),
    "read_engine": ("read_items",),
    "reading_signs": (
        "READING_PREFIX",
        "REMOVING",
        "ReadingSign",
        "announce_removal",
        "is_dead_sign",
        "live_readers",
    ),
    "own_files": (
        "is_own_file",
        "temporary_of",
    ),
    "removal": (
        "checkpoint_files",
        "clear_dead_saves",
        "remove_checkpoint",
    ),
    "saves": (
        "STALE_AFTER_SECONDS",
        "SaveSession",
        "new_save_id",
    ),
    "store": (
        "TEMPORARY_SUFFIX",
        "Entry",
        "Sink",
        "Source",
        "Store",
        "check_name",
    ),
    "stream_files": ("StreamFileSystem",),
    "stream_store": ("StreamStore",),
    "upload_sink": ("UploadSink",),
    "verify": (
        "Problem",
        "VerifyReport",
        "verify_checkpoint",
    ),
    "write_engine": (
        "DATA_SUFFIX",
        "write_items",
    ),
    "zip_check": (
        "ZipRecord",
        "is_zip",
        "record_crc32",
        "verify_zip",
        "zip_records",
    ),
    "zip_file": ("ZipFileWriter",),
    "zip_payload": (
        "Frame",
        "tensor_frame",
    ),
}
"""Module → what of it is public; the same as is imported above for those who check types."""

_MODULES = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
