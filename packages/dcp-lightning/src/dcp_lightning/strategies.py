"""Strategies of Lightning's Trainer with ranks that save and load their own parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dcp_lightning.checkpoint_io import PathLike
from dcp_lightning.sharded import OwnCheckpointIO, is_of_lightning, load_shards, state_of

try:
    from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
except ModuleNotFoundError:
    from pytorch_lightning.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy

_SHARDED = ("state_dict", "optimizer_states")


class DcpTrainerStrategy(OwnCheckpointIO):
    """Mix-in before a strategy of the Trainer, with its `DcpCheckpointIO`; no rank gathers the whole state.

    Checkpoints have Lightning's entries, but `on_load_checkpoint` gets no states of model and optimizers.

    Ranks: every rank of the job; saving and loading are collective.
    Source: Lightning 2.6 `lightning.pytorch.strategies.ModelParallelStrategy` (the overridden methods).
    """

    restore_checkpoint_after_setup = True
    lightning_restore_optimizer = False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return this rank's shards of the model."""
        return state_of(self.model, ())  # type: ignore[no-any-return]

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return this rank's shards of an optimizer."""
        return state_of(optimizer, [self.model])  # type: ignore[no-any-return]

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Do nothing: `load_checkpoint` loaded the model."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing: `load_checkpoint` loaded the optimizers."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: PathLike, storage_options: Any = None) -> None:
        """Save each rank's shards, and everything else from rank 0."""
        path = self.broadcast(str(filepath))
        mine = {name: value for name, value in checkpoint.items() if self.is_global_zero or name in _SHARDED}
        self.checkpoint_io.save(mine, path, storage_options, leads=self.is_global_zero)

    def load_checkpoint(self, checkpoint_path: PathLike, weights_only: bool | None = None) -> dict[str, Any]:
        """Load each rank's shards in place; return everything else."""
        path = self.broadcast(self.checkpoint_io.source_of(checkpoint_path))
        module = self.lightning_module
        fitting = module.trainer.state.fn == "fit"
        if is_of_lightning(path):
            checkpoint = super().load_checkpoint(path, weights_only=weights_only)
            super().load_model_state_dict(checkpoint, strict=module.strict_loading)
            if fitting:
                super().load_optimizer_state_dict(checkpoint)
            return checkpoint  # type: ignore[no-any-return]
        rest = self.checkpoint_io.load_except(path, _SHARDED, weights_only=weights_only)
        parts = {"state_dict": self.model}
        if fitting and "lr_schedulers" in rest:  # otherwise only the model was saved, and Lightning reports that
            parts["optimizer_states"] = [*self.optimizers]
        load_shards(self.checkpoint_io, path, parts, strict=module.strict_loading, weights_only=weights_only)
        return rest

    def teardown(self) -> None:
        """Wait for background saves, and raise their error."""
        try:
            self.checkpoint_io.teardown()
        finally:
            super().teardown()


class DcpDDPStrategy(DcpTrainerStrategy, DDPStrategy):
    """`DDPStrategy` in which ranks share the writing of replicated state."""


class DcpFSDPStrategy(DcpTrainerStrategy, FSDPStrategy):
    """`FSDPStrategy` that saves and loads shards with any `state_dict_type`."""


class DcpModelParallelStrategy(DcpTrainerStrategy, ModelParallelStrategy):
    """`ModelParallelStrategy` (FSDP2, tensor parallelism) that saves and loads shards."""
