"""`CheckpointManager` and its policies: when to save, which checkpoints to keep, and from which checkpoint to resume.

`dcp_core` saves and loads, installed storages handle URIs, and an optional saver saves in the background.
"""

from dcp_io import CheckpointRecord, KeepAll, KeepAny, KeepBest, KeepEvery, KeepFor, KeepLast, KeepPolicy
from dcp_manager.errors import StepWentBackError, UnfinishedSaveError
from dcp_manager.hosts.whereabouts import Whereabouts
from dcp_manager.manager import CheckpointManager
from dcp_manager.policies.lower_steps import LowerSteps
from dcp_manager.policies.on_signal import OnSignal
from dcp_manager.policies.saving_rules import EverySeconds, EverySteps, Moment, OnRequest, SaveAny, SavePolicy
from dcp_manager.restoring import Restored
from dcp_manager.savers import Saver, future_of

__all__ = [
    "CheckpointManager",
    "CheckpointRecord",
    "EverySeconds",
    "EverySteps",
    "KeepAll",
    "KeepAny",
    "KeepBest",
    "KeepEvery",
    "KeepFor",
    "KeepLast",
    "KeepPolicy",
    "LowerSteps",
    "Moment",
    "OnRequest",
    "OnSignal",
    "Restored",
    "SaveAny",
    "SavePolicy",
    "Saver",
    "StepWentBackError",
    "UnfinishedSaveError",
    "Whereabouts",
    "future_of",
]
