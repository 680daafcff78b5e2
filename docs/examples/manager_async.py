"""Save in the background every few steps, keep the last two checkpoints, and resume.

Run: python manager_async.py

On several ranks: call dist.init_process_group("gloo") first, and start it by torchrun.
"""

import torch

import dcp_all as dcp

STEPS = 40


def main():
    """Train for 40 steps."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def state(step):
        """All that the run goes on from."""
        return {"app": dcp.app_state(model, optimizer, step=step)}

    with (
        dcp.AsyncSaver("thread") as saver,  # "process" takes less of the trainer's time
        dcp.CheckpointManager(
            "managed-run",
            save_policy=dcp.EverySteps(10) | dcp.OnSignal(),
            keep_policy=dcp.KeepLast(2),
            saver=saver,
        ) as manager,
    ):
        restored = manager.restore(state(0))
        first = 1 if restored is None else restored.step + 1
        for step in range(first, STEPS + 1):
            model(torch.randn(16, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            manager.maybe_save(step, lambda step=step: state(step))
            if manager.preempted:
                break
    newest = dcp.latest_valid("managed-run")
    print(f"began at step {first}; newest checkpoint: {newest.path}")


if __name__ == "__main__":
    main()
