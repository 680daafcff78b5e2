"""Exceptions of `dcp_core`, and a tree of the exceptions of all packages.

Each class also derives from a built-in exception, in brackets. Messages name key, file, rank and remedy.

```
dcp_base:
DcpError (Exception)                                        base class
   InvalidPlaceError (ValueError)                           malformed path or URI
   PluginNotFoundError (LookupError, RuntimeError)          package not installed
   PluginLoadError (ImportError)                            plug-in not importable
   dcp_manifest:
   CheckpointNotFoundError (FileNotFoundError)              no checkpoint or file
      dcp_io.CheckpointReplacedError                        replaced during a read
   CorruptCheckpointError (ValueError)                      damaged or incomplete
   UnsupportedFormatError (ValueError)                      unknown version, layout or transform
      dcp_inspect.OtherFormatError                          another format
   UnsafeCheckpointError (ValueError)                       runs code or leaves its folder
   dcp_tiers:
   TiersError (ValueError)                                  wrong tiers
   dcp_io:
   CheckpointExistsError (FileExistsError)                  exists; `overwrite` is off
      dcp_tiers.SupersededError                             internal
   SaveInProgressError (FileExistsError)                    another save is running
   StorageError (OSError)                                   failed after all retries
      dcp_memory.KeeperLostError                            keeper ended or silent
   dcp_ranks:
   RanksError                                               coordination of ranks
      CheckpointException (RuntimeError)                    phase failed, on all ranks
      CoordinatorLostError (ConnectionError)                the ranks' store is silent
      CoordinatorTimeoutError (TimeoutError)                a rank missed the deadline
      PeerLostError (ConnectionError)                       a rank has died
      StreamError (ConnectionError)                         no connection to a rank
      OperationError (RuntimeError, ValueError)             impossible, or ranks disagree
   dcp_core:
   MissingKeyError (KeyError)                               the checkpoint lacks a name
   NotEnoughMemoryError (MemoryError)                       a tensor exceeds free memory
   PlanError (ValueError)                                   holes, overlaps, disagreement
   SaveSkippedError (RuntimeError)                          skipped by overlap policy
   UnsupportedValueError (TypeError, ValueError)            a value cannot be saved
   LoadMismatchError (RuntimeError, ValueError)             template and checkpoint differ
   dcp_state:
   StateMismatchError (RuntimeError, ValueError)            state dict and model differ
   dcp_async:
   StagingMismatchError (RuntimeError)                      copy and tensor differ
   SaverClosedError (RuntimeError)                          the saver is closed
   SaverDeadlineError (TimeoutError)                        a save exceeded its deadline
   WorkerError (RuntimeError)                               the worker cannot be used
   WorkerLostError (ConnectionError)                        the worker ended during a save
   dcp_exchange:
   ExchangeError (ConnectionError)                          ranks could not send data
      ExchangeInterruptedError                              internal
   dcp_manager:
   UnfinishedSaveError (TimeoutError)                       a background save is too slow
   dcp_prove:
   ResumeError (AssertionError)                             a resumed training differs
   dcp_memory:
   KeeperRefusedError (PermissionError)                     a keeper is another user's
dcp_core:
UnloadableObjectWarning (UserWarning)                       needs `allow_globals`
DivergentReplicaWarning (UserWarning)                       replicas differ between ranks
dcp_manifest:
UnsafePickleError (ValueError)                              internal
   ForbiddenGlobalError                                     internal
dcp_memory:
NoKeeperError (Exception)                                   internal
dcp_io:
Cancelled (Exception)                                       internal
```

Internal errors never reach a user.
"""

from __future__ import annotations

from dcp_base.errors import DcpError, InvalidPlaceError, PluginLoadError, PluginNotFoundError
from dcp_base.escaping import printable
from dcp_manifest.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsafeCheckpointError,
    UnsupportedFormatError,
)
from dcp_ranks import (
    CheckpointException,
    CoordinatorLostError,
    CoordinatorTimeoutError,
    OperationError,
    PeerLostError,
)

__all__ = [
    "CheckpointException",
    "CheckpointNotFoundError",
    "CoordinatorLostError",
    "CoordinatorTimeoutError",
    "CorruptCheckpointError",
    "DcpError",
    "InvalidPlaceError",
    "MissingKeyError",
    "NotEnoughMemoryError",
    "OperationError",
    "PeerLostError",
    "PlanError",
    "PluginLoadError",
    "PluginNotFoundError",
    "SaveSkippedError",
    "UnsafeCheckpointError",
    "UnsupportedFormatError",
    "UnsupportedValueError",
]


class MissingKeyError(DcpError, KeyError):
    """The checkpoint lacks a requested name."""

    def __str__(self) -> str:
        # KeyError shows the repr of its message.
        return printable(str(self.args[0]), keep="\n\t") if self.args else ""


class NotEnoughMemoryError(DcpError, MemoryError):
    """A value to load whole exceeds free memory."""


class PlanError(DcpError, ValueError):
    """A tensor's chunks leave holes, overlap, or differ between ranks."""


class SaveSkippedError(DcpError, RuntimeError):
    """An overlap policy skipped the save (`skip`) or replaced it (`latest`)."""


class UnsupportedValueError(DcpError, TypeError, ValueError):
    """A value's kind, name or class cannot be saved or loaded."""
