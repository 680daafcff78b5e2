"""Save a model that FSDP2 shards, and load it on any number of ranks.

Run: torchrun --nproc-per-node 2 fsdp2.py

Run it again with another --nproc-per-node: it loads what the first run saved.
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import dcp_all as dcp

dist.init_process_group("gloo")  # "nccl" on GPUs
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
model = fully_shard(torch.nn.Linear(64, 8), mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

found = [dcp.latest_valid("fsdp2-run") if dist.get_rank() == 0 else None]
dist.broadcast_object_list(found)  # every rank takes the same one
step = 0
if found[0] is not None:
    app = dcp.app_state(model, optimizer, step=0)
    dcp.load({"app": app}, checkpoint_id=found[0].path)
    step = app["step"]

for _ in range(5):
    step += 1
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

app = dcp.app_state(model, optimizer, step=step)
dcp.save({"app": app}, checkpoint_id=f"fsdp2-run/step-{step}")
if dist.get_rank() == 0:
    print(f"step {step}, saved by {dist.get_world_size()} ranks")
dist.destroy_process_group()
