"""What a launcher such as torchrun gives to the ranks that it starts: a store, and an environment that names it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

__all__ = ["launcher_store", "rank_environment"]


def launcher_store() -> Any:
    """A `TCPStore` at which ranks of this machine meet, on a port of its own from the start; ends with the object."""
    return dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, None, is_master=True, wait_for_workers=False
    )


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The variables for one rank, whose `init_process_group` is then a client of the launcher's store."""
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    elastic = {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    return {name: str(value) for name, value in {**values, **place, **elastic}.items()}
