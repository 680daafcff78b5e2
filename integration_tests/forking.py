"""What processes have in common that import everything once and fork those that do the work."""

from __future__ import annotations

import os
from datetime import timedelta

__all__ = ["WARNINGS", "join_group"]

# From Python 3.12 on, forking a process with threads warns; those of torch's libraries are idle here.
WARNINGS = ("-W", "error", "-W", "ignore:This process:DeprecationWarning")
"""Python's options for such a process: warnings are errors."""
_GROUP_SECONDS = 60


def join_group(world: int, rank: int, port_reader: int, port_writer: int) -> None:
    """Join the default process group in a forked rank.

    Args:
        world: Number of ranks.
        rank: This rank.
        port_reader: Descriptor of a pipe, made for this group before the ranks were forked.
        port_writer: Descriptor of its other end, through which rank 0 tells the others the port of the store.
    """
    import torch.distributed as dist

    timeout = timedelta(seconds=_GROUP_SECONDS)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, timeout=timeout, wait_for_workers=False)
        os.write(port_writer, store.port.to_bytes(4, "little") * (world - 1))
    else:
        port = int.from_bytes(os.read(port_reader, 4), "little")
        store = dist.TCPStore("127.0.0.1", port, None, is_master=False, timeout=timeout, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
