"""torchtitan's own trainer on CPU ranks over gloo: its llama3 debug model, on tokens that depend on the step alone.

Run with a folder, the numbers of ranks and steps, and options of the checkpoints as JSON; writes the steps' losses.
Ranks are forked after torchtitan is imported, which takes longer than the training. A rank that is not done in time
prints its stack and ends.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import socket
import sys
import types
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools import utils


class CpuDevice:
    """What torchtitan asks of a device's module, of which `torch.cpu` has a part."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: torch.device) -> None:
        pass

    def get_device_name(self, device: torch.device) -> str:
        return "CPU"

    def get_device_properties(self, device: torch.device) -> Any:
        return types.SimpleNamespace(total_memory=1 << 30)

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass


if not hasattr(dist, "set_timeout"):  # torch 2.13 has it under another name
    dist.set_timeout = dist.distributed_c10d._set_pg_timeout

utils.device_type, utils.device_module = "cpu", CpuDevice()  # before others take them from there

from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel_ce_loss  # noqa: E402

VOCABULARY = 2048
TIMEOUT_SECONDS = 180


class Tokens(BaseDataLoader):
    """Random tokens. Which ones a step gets, from all ranks together, does not depend on their number."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config, *, dp_world_size, dp_rank, seq_len, local_batch_size, **_):
        self.samples = 0
        self.ranks, self.rank, self.length, self.rows = dp_world_size, dp_rank, seq_len, local_batch_size

    def __iter__(self):
        while True:
            first = self.samples + self.rank * self.rows
            batch = torch.stack([self._row(first + row) for row in range(self.rows)])
            self.samples += self.rows * self.ranks
            yield {"input": batch[:, :-1]}, batch[:, 1:]

    def _row(self, number: int) -> torch.Tensor:
        return torch.randint(VOCABULARY, (self.length + 1,), generator=torch.Generator().manual_seed(number))

    def state_dict(self):
        return {"samples": self.samples}

    def load_state_dict(self, state_dict):
        self.samples = state_dict["samples"]


class NoTokenizer(BaseTokenizer):
    """For a trainer whose tokens come from nowhere."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **_):
        super().__init__()

    def encode(self, *args, **kwargs):
        raise NotImplementedError

    def decode(self, *args, **kwargs):
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return VOCABULARY


def trainer_config(folder: str, steps: int, *, by_dcp: bool = True, **checkpoint: Any) -> Any:
    """torchtitan's `llama3_debugmodel`, with what needs no GPU, no compiler and no download, in small batches."""
    config = llama3_debugmodel_ce_loss()
    model = config.model_spec.model
    del model.layers[2:]
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # the others are compiled
    config.dump_folder = folder
    config.tokenizer, config.dataloader = NoTokenizer.Config(), Tokens.Config()
    config.training.local_batch_size, config.training.global_batch_size = 2, 8
    config.training.seq_len, config.training.steps = 32, steps
    config.training.mixed_precision_param = "float32"
    config.training.disable_cuda_graphs = True
    config.lr_scheduler.total_steps = 100
    config.parallelism.spmd_backend = "partial_dtensor"  # the others need a later torch than 2.13
    config.activation_checkpoint = None
    config.debug.seed = 1
    config.debug.enable_structured_logging = False
    if by_dcp:
        config.override.imports = ["dcp_torchtitan.override.dcp_checkpoints"]
    config.checkpoint.enable = True
    for name, value in checkpoint.items():
        setattr(config.checkpoint, name, value)
    return config


def train(rank: int, ranks: int, port: int) -> None:
    """Train as one rank; rank 0 writes the losses of this run beside its checkpoints."""
    faulthandler.dump_traceback_later(TIMEOUT_SECONDS, exit=True)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    folder, steps, options = sys.argv[1], int(sys.argv[3]), json.loads(sys.argv[4])
    trainer = trainer_config(folder, steps, **options).build()
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(enable=True)  # gloo knows no other
    losses: dict[int, float] = {}
    log = trainer.metrics_processor.log

    def log_and_keep(step: int, loss: float, *args: Any, **kwargs: Any) -> None:
        losses[step] = loss
        log(step, loss, *args, **kwargs)

    trainer.metrics_processor.log = log_and_keep
    trainer.train()
    trainer.close()
    if rank == 0:
        told = {"manager": type(trainer.checkpointer).__name__, "losses": losses}
        Path(folder, f"up-to-{steps}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


def main() -> None:
    """Fork the ranks, and wait for them; the first that fails ends the others."""
    ranks = int(sys.argv[2])
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    running = [fork.Process(target=train, args=(rank, ranks, port)) for rank in range(ranks)]
    for process in running:
        process.start()
    while running:
        wait([process.sentinel for process in running])
        failed = [process for process in running if process.exitcode]
        running = [process for process in running if process.exitcode is None]
        if failed:
            for process in running:
                process.kill()
            sys.exit(f"a rank ended with {failed[0].exitcode}")


if __name__ == "__main__":
    main()
