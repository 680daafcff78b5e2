"""The thread saver: saves run in a thread of the trainer's process.

It suits small jobs: the thread competes with the training for Python's global interpreter lock.
"""

from __future__ import annotations

import contextlib

from dcp_async.options import SaverOptions
from dcp_async.queue.jobs import SaveJob
from dcp_async.queue.save_agreement import GroupLink
from dcp_async.staging.copy_state import Staged
from dcp_async.staging.wave_feed import WaveFeed, reserve_addresses
from dcp_core import Metadata
from dcp_core.toolkit import save_with

__all__ = ["ThreadBackend"]


class ThreadBackend:
    """Backend that runs saves in the saver's thread.

    Args:
        options: Options of the saver, which this backend ignores.
    """

    shares_memory = False

    def __init__(self, options: SaverOptions) -> None:
        del options

    def warm_up(self, link: GroupLink, staged: Staged | None) -> None:
        """Do nothing: there is no process to start."""

    def before_save(self) -> None:
        """Do nothing: there is no process that could have ended."""

    def run(self, job: SaveJob) -> Metadata:
        """Save the staged copy in the calling thread, without collectives on the trainer's process group."""
        with contextlib.ExitStack() as ends:
            feed, state = None, job.staged_state or {}
            if job.staged is not None:
                structure, waves, addresses = job.staged.structure, job.staged.waves, None
                if waves is not None:
                    addresses = reserve_addresses(structure.wave_bytes)
                    feed = WaveFeed(waves.saver_end, job.staged.arena.view(), structure, waves.piece_bytes, addresses)
                    ends.callback(feed.close)
                state = job.staged.state_dict(addresses)
            return save_with(
                job.link.coordinator(job.ticket),
                state,
                checkpoint_id=job.checkpoint_id,
                storage_writer=job.storage_writer,
                planner=job.planner,
                use_collectives=job.use_collectives,
                group=job.link.seat.key,
                feed=feed,
            )

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
