from __future__ import annotations

import pytest

pytest.importorskip("torchtitan", reason="needs torchtitan: nox -s frameworks")

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.trainer import Trainer

from dcp_torchtitan import DcpCheckpointManager

TARGET = "dcp_torchtitan.override.dcp_checkpoints"


def test_a_flag_replaces_the_manager_and_keeps_its_options() -> None:
    config = Trainer.Config(checkpoint=CheckpointManager.Config(enable=True, interval=7, async_mode="async"))
    replaced = apply_overrides(OverrideConfig(imports=[TARGET]), config)
    assert len(replaced) == 1
    assert type(config.checkpoint) is DcpCheckpointManager.Config
    assert (config.checkpoint.enable, config.checkpoint.interval, config.checkpoint.async_mode) == (True, 7, "async")
    assert config.checkpoint._owner is DcpCheckpointManager


def test_options_of_ours_may_follow() -> None:
    config = Trainer.Config()
    apply_overrides(OverrideConfig(imports=[(TARGET, {"tolerated_failures": 2})]), config)
    assert config.checkpoint.tolerated_failures == 2


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(ValueError, match="tolerated_failure'"):
        apply_overrides(OverrideConfig(imports=[(TARGET, {"tolerated_failure": 2})]), Trainer.Config())


def test_managers_of_others_stay() -> None:
    class Theirs(CheckpointManager.Config):
        pass

    config = Trainer.Config(checkpoint=Theirs())
    assert apply_overrides(OverrideConfig(imports=[TARGET]), config) == []
