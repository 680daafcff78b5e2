"""Trains under accelerate on the ranks of torchrun: `KIND FOLDER ACTION`; prints digests that do not depend on ranks.

KIND is `ddp` or `fsdp2`, ACTION `save` (after two steps) or `load` (and two steps more).
"""

import hashlib
import os
import sys

import torch
from accelerate import Accelerator, DataLoaderConfiguration, DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor

from dcp_transformers import load_state, save_state


def say(*values):
    """Print a line in one write: ranks share the pipe."""
    os.write(1, (" ".join(map(str, values)) + "\n").encode())


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def digest(model, optimizer):
    values = [whole(value) for value in model.state_dict().values()]
    for parameter in model.parameters():
        values += [whole(value) for _, value in sorted(optimizer.state[parameter].items())]
    return hashlib.sha1(b"".join(value.detach().numpy().tobytes() for value in values)).hexdigest()


class Counter:
    value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def main(kind, folder, action):
    seeded = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=seeded)
    if kind == "fsdp2":  # without an accelerator the plug-in is ignored; prepared models are sharded nevertheless
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="NO_WRAP", cpu_ram_efficient_loading=False
        )
    torch.manual_seed(3 if action == "save" else 4)  # the order of the data is the saved one nevertheless
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    if action == "load":
        torch.nn.init.zeros_(model[0].weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    data = torch.utils.data.DataLoader(torch.arange(96.0).reshape(16, 6) / 96, batch_size=2, shuffle=True)
    model, optimizer, scheduler, data = accelerator.prepare(model, optimizer, scheduler, data)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    batches, at = data, 0
    if action == "load":
        torch.manual_seed(99)
        at = load_state(accelerator, folder, at=0)["at"]
        batches = accelerator.skip_first_batches(data, at)
        say("loaded", digest(model, optimizer), scheduler.get_last_lr(), counter.value, at)
    for number, batch in enumerate(batches, at + 1):
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        counter.value += 1
        if action == "save" and number == 2:
            save_state(accelerator, folder, at=number)
            say("saved", digest(model, optimizer), scheduler.get_last_lr(), counter.value, number)
        if number == 4:
            break
    say("done", digest(model, optimizer))
    sharded = sum(isinstance(value, DTensor) for value in model.state_dict().values())
    say("sharded", sharded, os.environ.get("WORLD_SIZE"))
    accelerator.end_training()


main(*sys.argv[1:])
