"""Checkpoints of Hugging Face's Trainer and accelerate, and exports of their models for the Hub."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_base import import_lazily

if TYPE_CHECKING:
    from dcp_transformers.accelerator import load_state as load_state
    from dcp_transformers.accelerator import save_state as save_state
    from dcp_transformers.export import describe_model as describe_model
    from dcp_transformers.export import export_adapter as export_adapter
    from dcp_transformers.export import export_model as export_model
    from dcp_transformers.trainer import manage_checkpoints as manage_checkpoints

# The package is imported by every process that looks for plug-ins: transformers is imported on first use.
__getattr__, __dir__ = import_lazily(
    __name__,
    {
        "dcp_transformers.accelerator": ("load_state", "save_state"),
        "dcp_transformers.export": ("describe_model", "export_adapter", "export_model"),
        "dcp_transformers.trainer": ("manage_checkpoints",),
    },
)
