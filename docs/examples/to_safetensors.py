"""Export the weights of a checkpoint as safetensors, under the model's own names.

Run: python to_safetensors.py
"""

from pathlib import Path

import torch
from safetensors.torch import load_file

import dcp_all as dcp

model = torch.nn.Sequential(
    torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)
)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(1, 8)).sum().backward()
optimizer.step()
dcp.save(
    {"app": dcp.app_state(model, optimizer, step=1)}, checkpoint_id="export/step-1"
)

Path("model.safetensors").unlink(
    missing_ok=True
)  # a conversion replaces nothing unasked
dcp.convert(
    "export/step-1",
    "model.safetensors",
    include=["app.model.*"],
    rename_regex=[(r"^app\.model\.", "")],
    dtype=torch.bfloat16,
)
weights = load_file("model.safetensors")
print({name: tuple(value.shape) for name, value in weights.items()})
