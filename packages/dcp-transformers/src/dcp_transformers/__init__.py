"""Checkpoints of Hugging Face's Trainer and accelerate, and exports of their models for the Hub."""

from dcp_transformers.accelerator import load_state, save_state
from dcp_transformers.export import export_adapter, export_model
from dcp_transformers.trainer import TrainerCheckpoints, manage_checkpoints

__all__ = ["TrainerCheckpoints", "export_adapter", "export_model", "load_state", "manage_checkpoints", "save_state"]
