"""Bytes and seconds of a save and a load through the adapters, beside the frameworks' own, in one run.

    torchrun --nproc-per-node 2 -m integration_tests.benchmarks.frameworks torchtitan
    python -m integration_tests.benchmarks.frameworks trainer

Run by a Python that has the framework. The contenders take turns, each round in the other order; the first round warms
up. Prints medians, and the ratio of the two times of each round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from integration_tests.benchmarks.figures import paired
from integration_tests.benchmarks.folders import file_sizes, remove, settle

Act = Callable[[], object]


@dataclass(frozen=True)
class Contender:
    """Functions that prepare a save into a folder and a load from it; what they return is timed."""

    save: Callable[[Path], Act]
    load: Callable[[Path], Act]


def measure(contenders: dict[str, Contender], root: Path, rounds: int) -> None:
    """Time every contender in each round, and print what rank 0 measured; the first contender is compared with."""
    taken: dict[tuple[str, str], list[float]] = {}
    sizes: dict[str, int] = {}
    for turn in range(rounds + 1):
        for name in sorted(contenders, reverse=bool(turn % 2)):
            folder = root / f"{list(contenders).index(name)}-{turn}"
            for what, prepare in (("save", contenders[name].save), ("load", contenders[name].load)):
                act = prepare(folder)
                _together(settle)
                start = time.perf_counter()
                _together(act)
                if turn:
                    taken.setdefault((what, name), []).append(time.perf_counter() - start)
            _together(partial(_note_size, sizes, name, folder))
            _together(partial(remove, folder))
    if dist.is_initialized() and dist.get_rank():
        return
    first = next(iter(contenders))
    for (what, name), seconds in sorted(taken.items(), reverse=True):
        ratio = paired(taken[what, first], seconds)
        assert ratio is not None
        text = f"{statistics.median(seconds):.3f} s, {sizes[name] / 1e6:.1f} MB; {first} ÷ this: {ratio.median:.2f}"
        print(f"{what:4} {name:24} {text} ({ratio.low:.2f} to {ratio.high:.2f})", flush=True)


def _note_size(sizes: dict[str, int], name: str, folder: Path) -> None:
    sizes[name] = file_sizes(folder)["bytes"]


def _together(act: Act) -> None:
    act()
    if dist.is_initialized():
        dist.barrier()


def torchtitan(layers: int) -> dict[str, Contender]:
    """Each of torchtitan's managers, with FSDP's shards of a model and of its AdamW state (12.6 MB a layer)."""
    from torchtitan.components.checkpointer import CheckpointManager

    from dcp_torchtitan import DcpCheckpointManager

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(layers)))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 1024)).sum().backward()
    optimizer.step()
    of_optimizer = {
        f"state.{fqn}.{name}": value
        for fqn, parameter in model.named_parameters()
        for name, value in optimizer.state[parameter].items()
    }

    def act(kind: Any, folder: Path, *, loads: bool) -> None:
        manager = kind.Config(enable=True, interval=1, folder=folder.name, keep_latest_k=0).build(
            dataloader=_Value({"position": 1}),
            model_parts=[model],
            optimizers=_Value(of_optimizer),
            lr_schedulers=_Value({"last_epoch": 1}),
            states={"train_state": _Value({"step": 1})},
            sd_adapter=None,
            base_folder=str(folder.parent),
        )
        done = manager.load() if loads else manager.save(1)
        manager.close()
        if not done:
            raise RuntimeError(f"{kind.__name__} did nothing in {folder}")

    def contender(kind: Any) -> Contender:
        return Contender(
            lambda folder: partial(act, kind, folder, loads=False),
            lambda folder: partial(act, kind, folder, loads=True),
        )

    return {"ours": contender(DcpCheckpointManager), "torchtitan's own": contender(CheckpointManager)}


class _Value:
    """A state in place of torchtitan's containers, which both managers call alike."""

    def __init__(self, value: dict[str, Any]) -> None:
        self._value = value

    def state_dict(self) -> dict[str, Any]:
        return dict(self._value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._value = state_dict


def trainer(layers: int, root: Path) -> dict[str, Contender]:
    """A Trainer with a GPT-2 and AdamW that saves and resumes, but does not train."""
    trained = _make_trainer(layers, root)
    trained.trains = True
    trained.train()
    make = partial(_trainer_contender, layers, trained)
    return {
        "ours": make(ours=True, flush=False),
        "the Trainer's own": make(ours=False, flush=False),
        "the same, flushed": make(ours=False, flush=True),
    }


def _make_trainer(layers: int, folder: Path) -> Any:
    import transformers

    class OnlyCheckpoints(transformers.Trainer):  # type: ignore[misc]
        trains = False

        def _inner_training_loop(self, *arguments: Any, **options: Any) -> Any:
            if self.trains:
                return super()._inner_training_loop(*arguments, **options)
            place = options["resume_from_checkpoint"]
            if place is None:
                self.state.global_step = 1
                return self._save_checkpoint(self.model, None)
            self._load_optimizer_and_scheduler(place)
            return self._load_rng_state(place)

    transformers.logging.set_verbosity_error()
    size = {"vocab_size": 8192, "n_positions": 64, "n_embd": 512, "n_layer": layers, "n_head": 8}
    config = transformers.GPT2Config(**size, bos_token_id=0, eos_token_id=0)
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True}
    arguments = transformers.TrainingArguments(str(folder), max_steps=1, save_strategy="no", **quiet)
    example = {"input_ids": torch.arange(64), "labels": torch.arange(64)}
    made = OnlyCheckpoints(transformers.GPT2LMHeadModel(config), arguments, train_dataset=[example] * 8)
    made.create_optimizer_and_scheduler(1)
    return made


def _trainer_contender(layers: int, trained: Any, *, ours: bool, flush: bool) -> Contender:
    from dcp_transformers import manage_checkpoints

    def manage(one: Any) -> Any:
        if ours:
            manage_checkpoints(one)
        return one

    def save(folder: Path) -> Act:
        one = _make_trainer(layers, folder)
        one.model, one.optimizer, one.lr_scheduler = trained.model, trained.optimizer, trained.lr_scheduler
        manage(one)

        def act() -> None:
            one.train()
            for path in folder.rglob("*") if flush else ():
                descriptor = os.open(path, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)

        return act

    def load(folder: Path) -> Act:
        one = manage(_make_trainer(layers, folder))
        return partial(one.train, resume_from_checkpoint=str(folder / "checkpoint-1"))

    return Contender(save, load)


def main() -> None:
    """Measure one framework's contenders."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=("torchtitan", "trainer"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--place", default=tempfile.gettempdir(), help="folder to save into; the same on all ranks")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    root = Path(asked.place) / f"dcp-bench-{os.environ.get('TORCHELASTIC_RUN_ID', os.getpid())}"
    root.mkdir(parents=True, exist_ok=True)
    try:
        contenders = torchtitan(asked.layers) if asked.framework == "torchtitan" else trainer(asked.layers, root)
        measure(contenders, root, asked.rounds)
    finally:
        remove(root)
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
