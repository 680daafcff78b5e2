"""`CheckpointManager` and its policies: when to save, which checkpoints to keep, and where to resume."""

from dcp_io import CheckpointRecord, KeepAll, KeepBest, KeepEvery, KeepFor, KeepLast, KeepPolicy
from dcp_manager.background import UnfinishedSaveError
from dcp_manager.manager import CheckpointManager
from dcp_manager.restoring import Restored
from dcp_manager.save_policies import EverySeconds, EverySteps, OnRequest, OnSignal, SavePolicy
from dcp_manager.space import Preflight, preflight

__all__ = [
    "CheckpointManager",
    "CheckpointRecord",
    "EverySeconds",
    "EverySteps",
    "KeepAll",
    "KeepBest",
    "KeepEvery",
    "KeepFor",
    "KeepLast",
    "KeepPolicy",
    "OnRequest",
    "OnSignal",
    "Preflight",
    "Restored",
    "SavePolicy",
    "UnfinishedSaveError",
    "preflight",
]
