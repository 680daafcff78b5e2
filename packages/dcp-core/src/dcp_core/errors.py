"""Exceptions of `dcp_core`, and a tree of the exceptions of all packages.

Each class derives from `DcpError` and from a built-in exception. Messages name the key, file and rank where they are
known, and a remedy. The exceptions of all packages, with their other base classes in brackets:

```
dcp_manifest:
DcpError (Exception)                                        base class of the errors of all packages
├─ CheckpointNotFoundError (FileNotFoundError)              no checkpoint here, or a file is missing
│  └─ dcp_io.CheckpointReplacedError                        a checkpoint was replaced while it was read
├─ CorruptCheckpointError (ValueError)                      a checkpoint is damaged or incomplete
├─ InvalidIndexError (ValueError)                           an index to write is inconsistent
├─ InvalidPlaceError (ValueError)                           a path or URI is malformed
├─ UnsupportedFormatError (ValueError)                      a newer version, or an unknown layout or transform
│  └─ dcp_inspect.OtherFormatError                          files of another format, for a converter
├─ UnsafeCheckpointError (ValueError)                       a checkpoint tries to run code or leave its folder
│ dcp_tiers:
├─ PromotionError (RuntimeError)                            a checkpoint cannot be promoted to another tier
│  └─ SupersededError                                       the tier has a later save of the step
├─ TierFullError (OSError)                                  a tier has reached its byte budget
├─ TiersError (ValueError)                                  the description of tiers is wrong
│ dcp_io:
├─ CheckpointExistsError (FileExistsError)                  a checkpoint exists; `overwrite` is off
├─ NotAFolderError (NotADirectoryError)                     the path of a checkpoint is a file
├─ SaveInProgressError (FileExistsError)                    another save writes to the same place
├─ SaveLostError (RuntimeError)                             another save considered this save dead
├─ StorageError (OSError)                                   the storage failed after all retries
│  ├─ dcp_object.ChangedError                               another process replaced the object
│  └─ dcp_memory.KeeperLostError                            a keeper has ended or does not answer
├─ StoreNotFoundError (LookupError, RuntimeError)           no package opens this kind of store
│ dcp_core:
├─ PayloadError (TypeError)                                 a tensor has no data that could be written
├─ CheckpointException (dcp_ranks.PhaseFailedError)         a phase failed on some rank; raised on all
├─ CoordinatorLostError (dcp_ranks.CoordinatorLostError)    the store of the ranks does not answer
├─ CoordinatorTimeoutError (dcp_ranks.CoordinatorTimeoutError)  a rank missed the deadline
├─ PeerLostError (dcp_ranks.PeerLostError)                  a rank has died
├─ RankDisagreementError (dcp_ranks.RankDisagreementError)  ranks call different functions
├─ OperationError (dcp_ranks.OperationError)                a save or load cannot continue
├─ MissingKeyError (KeyError)                               a name is not in the checkpoint
├─ NotEnoughMemoryError (MemoryError)                       a tensor is larger than the free memory
├─ DuplicateKeyError (ValueError)                           two tensors or objects would have one name
├─ PlanError (ValueError)                                   chunks leave holes, overlap or disagree
├─ ShardNotFoundError (LookupError, ValueError)             this rank has no shard at an offset
├─ UnsupportedValueError (TypeError, ValueError)            a kind of tensor or object cannot be saved
├─ UnloadableObjectError (TypeError)                        a saved object could not be loaded again
├─ PluginNotFoundError (dcp_hooks.PluginNotFoundError)      a package must be installed
├─ NoCheckpointIdError (ValueError, RuntimeError)           neither a checkpoint id nor a storage was passed
├─ DuplicatePluginError (dcp_hooks.DuplicatePluginError)    two plug-ins offer the same name
├─ PluginLoadError (dcp_hooks.PluginLoadError)              a plug-in cannot be imported
├─ LoadMismatchError (RuntimeError, ValueError)             template and checkpoint do not match
│ dcp_state:
├─ StateMismatchError (RuntimeError, ValueError)            state dict and model or optimizer do not match
├─ UnknownParameterError (LookupError, ValueError)          an optimizer's parameter is not in the model
├─ UnsupportedOptimizerError (TypeError, NotImplementedError)  an optimizer's state has no names
│ dcp_async:
├─ StagingLimitError (MemoryError)                          the state exceeds the memory limit of staging
├─ MutatedWhileStagedError (RuntimeError)                   a tensor changed while it was copied
├─ StagingMismatchError (RuntimeError)                      a staged copy does not match its tensor
├─ NestedSaveError (RuntimeError)                           a thread started a save while starting one
├─ SaveSkippedError (RuntimeError)                          skipped by the overlap policy
├─ SaveSupersededError (RuntimeError)                       replaced by a later save
├─ SaverClosedError (RuntimeError)                          the saver is closed
├─ SaverDeadlineError (TimeoutError)                        a save exceeded its deadline
├─ WorkerError (RuntimeError)                               the worker process cannot start or be used
├─ WorkerLostError (ConnectionError)                        the worker process ended during a save
│ dcp_exchange:
├─ ExchangeError (ConnectionError)                          ranks could not pass on what they read
│  ├─ ExchangeInterruptedError                              another rank has failed
│  └─ ExchangeTimeoutError (TimeoutError)                   other ranks have sent nothing for too long
│ dcp_manager:
├─ UnfinishedSaveError (TimeoutError)                       a background save takes too long
├─ StepWentBackError (ValueError)                           the step is lower than a good checkpoint
│ dcp_memory:
├─ KeeperFullError (OSError)                                a keeper has no memory left
├─ KeeperRefusedError (PermissionError)                     a keeper is another user's
├─ KeeperStartError (OSError)                               a keeper could not be started
│ dcp_bridge:
├─ UntestedTorchError (RuntimeError)                        `replace_stock` does not know this version of torch
│ dcp_inspect:
├─ CheckpointInUseError (RuntimeError)                      the checkpoint to remove is being read
└─ MissingValueError (LookupError)                          a name is not in the checkpoint
dcp_ranks:
RanksError (Exception)                                      base class of errors in coordination of ranks
├─ PhaseFailedError (RuntimeError)                          a phase failed on some rank; raised on all
├─ CoordinatorLostError (ConnectionError)                   the store of the ranks does not answer
│  └─ VanishedKeyError                                      internal: a key in the store was deleted
├─ CoordinatorTimeoutError (TimeoutError)                   a rank missed the deadline
├─ PeerLostError (ConnectionError)                          a rank has died
├─ RankDisagreementError (ValueError)                       ranks call different functions
├─ StreamError (ConnectionError)                            no connection to a rank, or it is lost
├─ JobSecretError (ValueError)                              the job's secret cannot be used
└─ OperationError (RuntimeError)                            the operation cannot continue
dcp_hooks:
HookError (Exception)                                       base class of the errors of plug-ins
├─ PluginNotFoundError (LookupError, RuntimeError)          a package must be installed
├─ DuplicatePluginError (ValueError)                        two plug-ins offer the same name
└─ PluginLoadError (ImportError)                            a plug-in cannot be imported
dcp_data:
PositionMismatchError (ValueError)                          a data position is of other data or another order
dcp_core:
UnloadableObjectWarning (UserWarning)                       a saved object loads only with `allow_globals`
DivergentReplicaWarning (UserWarning)                       replicas differ between ranks
dcp_manifest:
BrokenPickleError (ValueError)                              internal: a pickle is damaged
UnsafePickleError (ValueError)                              internal: a pickle exceeds the allow-list or budget
└─ ForbiddenGlobalError                                     internal: a global is not on the allow-list
dcp_memory:
BadRequestError (Exception)                                 internal: a request to a keeper has wrong fields
FrameError (ValueError)                                     internal: bytes on a keeper's socket are no frame
FullError (Exception)                                       internal: a keeper has no room
NoKeeperError (Exception)                                   internal: no keeper of a run is there
dcp_io:
TruncatedError (OSError)                                    a response was shorter than requested
Cancelled (Exception)                                       internal: another thread failed
dcp_async:
NotUnderstoodError (Exception)                              internal: a message cannot be unpickled
dcp_state:
NotPlainDataError (Exception)                               internal: an object cannot be copied safely
```

Errors marked as internal never reach a user.
"""

from __future__ import annotations

from typing import Final

import dcp_ranks
from dcp_hooks import errors as hooks_errors
from dcp_manifest.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DcpError,
    InvalidPlaceError,
    UnsafeCheckpointError,
    UnsupportedFormatError,
)
from dcp_manifest.printable import printable

__all__ = [
    "RANK_ERRORS",
    "CheckpointException",
    "CheckpointNotFoundError",
    "CoordinatorLostError",
    "CoordinatorTimeoutError",
    "CorruptCheckpointError",
    "DcpError",
    "DuplicateKeyError",
    "DuplicatePluginError",
    "InvalidPlaceError",
    "MissingKeyError",
    "NoCheckpointIdError",
    "NotEnoughMemoryError",
    "OperationError",
    "PeerLostError",
    "PlanError",
    "PluginLoadError",
    "PluginNotFoundError",
    "RankDisagreementError",
    "ShardNotFoundError",
    "UnloadableObjectError",
    "UnsafeCheckpointError",
    "UnsupportedFormatError",
    "UnsupportedValueError",
]


class CheckpointException(DcpError, dcp_ranks.PhaseFailedError):  # noqa: N818 - stock's name
    """A phase of a save or load failed on at least one rank; every rank raises this error, with the same `failures`.

    Also a RuntimeError, which stock raises for some of these failures, such as a checkpoint id that no storage accepts.

    Args:
        msg: Description of the failure; `str(error)` begins with this text.
        failures: Failing rank → (exception, or None if it could not be pickled; traceback as text).

    Source: torch 2.13 `torch.distributed.checkpoint.api.CheckpointException`, there a BaseException.
    """


class CoordinatorLostError(DcpError, dcp_ranks.CoordinatorLostError):
    """The store or process group through which ranks communicate does not answer any more."""


class CoordinatorTimeoutError(DcpError, dcp_ranks.CoordinatorTimeoutError):
    """Some ranks did not arrive at a phase of a save or load before the other ranks' deadline.

    Args:
        phase: Name of the phase that the ranks were in.
        ranks: Ranks (within the process group) that did not arrive.
        waited_seconds: Time in seconds that the other ranks waited.
    """


class PeerLostError(DcpError, dcp_ranks.PeerLostError):
    """Ranks were lost during a save or load: their processes have ended, or their hosts do not answer.

    Args:
        phase: Name of the phase that the ranks were in.
        ranks: Ranks (within the process group) that are lost.
        how: Description of each rank's loss, such as "its process has ended", in the order of `ranks`.
    """


class RankDisagreementError(DcpError, dcp_ranks.RankDisagreementError):
    """Ranks called different functions, or passed different arguments where all must agree; the message lists them."""


class OperationError(DcpError, dcp_ranks.OperationError):
    """A save or load cannot continue on this rank: it has ended, or the other ranks no longer wait for this rank."""


RANK_ERRORS: Final = dcp_ranks.ErrorTypes(
    phase_failed=CheckpointException,
    peer_lost=PeerLostError,
    coordinator_timeout=CoordinatorTimeoutError,
    coordinator_lost=CoordinatorLostError,
    rank_disagreement=RankDisagreementError,
    operation=OperationError,
)
"""Exception classes for coordinators of this project's packages; all of them derive from `DcpError`."""


class MissingKeyError(DcpError, KeyError):
    """The checkpoint has no tensor or object with a requested name."""

    def __str__(self) -> str:
        # KeyError would show the repr of the message.
        return printable(str(self.args[0]), keep="\n\t") if self.args else ""


class NotEnoughMemoryError(DcpError, MemoryError):
    """A tensor or object that must be loaded as a whole is larger than the memory that can be allocated."""


class DuplicateKeyError(DcpError, ValueError):
    """Two tensors or objects of a state dict would be saved under the same FQN."""


class PlanError(DcpError, ValueError):
    """The save plans of the ranks are inconsistent: chunks of a tensor leave holes, overlap, or differ in metadata."""


class ShardNotFoundError(DcpError, LookupError, ValueError):
    """This rank's tensor has no shard at the offset that a read or write item names."""


class UnsupportedValueError(DcpError, TypeError, ValueError):
    """A tensor or object in a state dict is of a kind that cannot be saved or loaded."""


class UnloadableObjectError(DcpError, TypeError):
    """An object to save names classes or functions that a later load would refuse."""


class PluginNotFoundError(DcpError, hooks_errors.PluginNotFoundError):
    """No installed plug-in offers the requested storage, transform or saver; the message names the package to install.

    Also a RuntimeError, which stock raises for a checkpoint id that none of its storages accepts.
    """


class NoCheckpointIdError(DcpError, ValueError, RuntimeError):
    """A save or load was called with neither a checkpoint id nor a storage.

    Also a RuntimeError, which stock raises in this case.
    """


class DuplicatePluginError(DcpError, hooks_errors.DuplicatePluginError):
    """Two plug-ins offer an entry, such as a storage, under the same name; the message names both."""


class PluginLoadError(DcpError, hooks_errors.PluginLoadError):
    """An installed plug-in that may be needed cannot be imported, or its hooks are not valid."""
