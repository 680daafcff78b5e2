"""Checkpoints of Hugging Face's Trainer and accelerate, and exports of their models for the Hub.

How states are saved, kept and loaded is the other packages'; here is what these two frameworks hold, and when they ask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_hooks import import_lazily

if TYPE_CHECKING:
    from dcp_transformers.accelerator import load_state, save_state
    from dcp_transformers.export import export_model
    from dcp_transformers.trainer import TrainerCheckpoints, manage_checkpoints

__all__ = ["TrainerCheckpoints", "export_model", "load_state", "manage_checkpoints", "save_state"]

__getattr__, __dir__ = import_lazily(
    __name__,
    {
        "dcp_transformers.accelerator": ("load_state", "save_state"),
        "dcp_transformers.export": ("export_model",),
        "dcp_transformers.trainer": ("TrainerCheckpoints", "manage_checkpoints"),
    },
)
