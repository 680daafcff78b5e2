"""Train in one process, stop, and go on from the newest checkpoint.

Run: python single_process.py

Run the script again to resume from its last checkpoint. To start over, delete the
folder `run`.
"""

import torch

import dcp_all as dcp

torch.manual_seed(0)
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def state(step):
    """All that the run goes on from."""
    return {"app": dcp.app_state(model, optimizer, step=step, random=dcp.RandomState())}


first = 0
newest = dcp.latest_valid("run")
if newest is not None:
    restored = state(0)
    dcp.load(restored, checkpoint_id=newest.path)
    first = restored["app"]["step"]
    print(f"resumed from {newest.path}")

step = first
for _ in range(10):
    step += 1
    loss = model(torch.randn(32, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dcp.save(state(step), checkpoint_id=f"run/step-{step}")
print(f"step {step}: loss {loss.item():.4f}, saved in run/step-{step}")
