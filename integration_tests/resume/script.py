"""Script for `test_script`, started as by torchrun: `HOW [OMITTED]`, where HOW is how it saves.

HOW is `save`, which replaces one checkpoint each time; `manager`; `thread`, a manager that saves in the background; or
`async`, a save in the background without a manager.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import dcp_all as dcp

how, *omitted = sys.argv[1:]
dist.init_process_group("gloo")
torch.manual_seed(int(os.environ["RANK"]))
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
images = torch.randn(20, 4, generator=torch.Generator().manual_seed(1))
data = dcp.ResumableSampler(images, global_batch_size=4, seed=2)
loader = data.loader(images)
step = 0


def state() -> dict[str, Any]:
    parts: dict[str, Any] = {"scheduler": scheduler, "random": dcp.RandomState(), "data": data}
    kept = {name: part for name, part in parts.items() if name not in omitted}
    return {"app": dcp.app_state(model, optimizer, step=step, **kept)}


manager = saver = None
if how in ("manager", "thread"):
    saver = dcp.AsyncSaver("thread") if how == "thread" else None
    manager = dcp.CheckpointManager("run", save_policy=dcp.EverySteps(2), saver=saver)
found = state()
if manager is not None:
    manager.restore(found)
elif Path("latest", ".metadata").exists():
    dcp.load(found, checkpoint_id="latest")
step = found["app"]["step"]
while data.epoch < 2:
    for batch in loader:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step += 1
        if manager is not None:
            manager.maybe_save(step, state)
        elif step % 2 == 0:
            (dcp.async_save if how == "async" else dcp.save)(state(), checkpoint_id="latest")
if manager is not None:
    manager.close()
if saver is not None:
    saver.close()
dist.destroy_process_group()
