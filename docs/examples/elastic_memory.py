"""Go on from memory after a crash: torchrun starts the ranks again.

Run: torchrun --nproc-per-node 2 --max-restarts 3 elastic_memory.py
with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment: each start then has a
store of its own, in which gloo cannot find addresses of killed ranks.

With --crash-at 35, one rank kills itself before step 35: the ranks go on from the last
step that a keeper, a process of the host, has kept.
`dcp keeper stop elastic-run` ends the keeper.
"""

import argparse
import os
import signal

import torch
import torch.distributed as dist

import dcp_all as dcp

STEPS = 60


def main(crash_at):
    """Train; every tenth step is kept in memory, every 40th in a folder, too."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    starts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tiers = dcp.Tiers(
        [
            dcp.Tier("keeper://elastic-run", per_host=True, keep=dcp.KeepLast(2)),
            dcp.Tier("slow", keep=dcp.KeepEvery(40)),
        ]
    )

    def state(step):
        """All that the run goes on from."""
        return {"app": dcp.app_state(model, optimizer, step=step)}

    with (
        dcp.AsyncSaver("thread") as saver,
        dcp.CheckpointManager(
            tiers, save_policy=dcp.EverySteps(10), saver=saver
        ) as manager,
    ):
        restored = manager.restore(state(0))
        begun = 0 if restored is None else restored.step
        if rank == 0:
            print(f"start {starts + 1} goes on from step {begun}", flush=True)
        for step in range(begun + 1, STEPS + 1):
            if step == crash_at and starts == 0 and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            chance = torch.Generator().manual_seed(1000 * step + rank)
            samples = torch.randn(16, 64, generator=chance)
            model(samples).square().mean().backward()
            for weight in model.parameters():
                dist.all_reduce(weight.grad)
            optimizer.step()
            optimizer.zero_grad()
            manager.maybe_save(step, lambda step=step: state(step))
    if rank == 0:
        total = sum(weight.double().sum().item() for weight in model.parameters())
        print(f"step {STEPS}: the weights sum up to {total!r}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--crash-at", type=int, help="step before which a rank dies")
    main(parser.parse_args().crash_at)
