"""`estimate`: bytes, files, memory and time of a save, from its plan, without writing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist

from dcp_core.adopt_foreign import adopt_writer
from dcp_core.calls.outside_compile import outside_compile
from dcp_core.calls.positional import refuse_path
from dcp_core.errors import RANK_ERRORS, UnsupportedValueError
from dcp_core.events import write_rate
from dcp_core.records.protocols import CheckpointId, SavePlanner, StorageWriter, with_states
from dcp_core.saving import measure_with
from dcp_core.state_dict.per_rank import with_rank_values
from dcp_core.storage.storage_writer import ByteStorageWriter
from dcp_core.storage_choice import resolve_writer
from dcp_manifest import METADATA_NAME
from dcp_manifest.printable import printable_bytes
from dcp_ranks import DEFAULT_TIMEOUT_SECONDS, make_coordinator

__all__ = ["Estimate", "RankEstimate", "estimate"]

_ANYWHERE = "estimate"
"""Path of a local checkpoint that is never made."""


class EstimatingSaver(Protocol):
    """Contract of a saver that can compute how much memory its copy of a state dict takes.

    A saver may also have a method `bytes_to_wait_for(state_dict)`, which returns the number of bytes that do not fit
    into its memory, so that its `save` waits until the storage has taken them.
    """

    def bytes_to_stage(self, state_dict: dict[str, Any]) -> int:
        """Return the size in bytes of the memory that a copy of a state dict takes on this rank, without copying."""
        ...


@dataclass(frozen=True, slots=True)
class RankEstimate:
    """Estimate of one rank's part of a save: bytes, files, memory for the copy, and time."""

    bytes: int
    """Size in bytes of the files that the rank writes; on the coordinator, the index is included."""
    files: int
    """Number of files that the rank writes; on the coordinator, the index is included."""
    staging_bytes: int
    """Size in bytes of the memory for an asynchronous saver's copy of the state dict; 0 for `save`, without a copy."""
    seconds: float | None
    """Duration of the write in seconds, at the rate of this rank's last save to a checkpoint id with the same scheme.

    None if this process has not yet saved 1 MiB or more to such a checkpoint id.
    """
    index_bytes: int = 0
    """Size in bytes of the index, which the coordinator writes; 0 on other ranks."""
    waiting_bytes: int = 0
    """Number of bytes of the state dict that do not fit into an asynchronous saver's memory for copies.

    The storage must have taken them before the saver's `save` returns, unless other ranks write some of them.
    """
    waiting_seconds: float | None = 0.0
    """Time in seconds for which training waits for that, at the same rate as `seconds`; None if the rate is unknown."""


@dataclass(frozen=True, slots=True, repr=False)
class Estimate:
    """Estimate of a save: bytes, files, memory for copies, and time.

    Args:
        ranks: Estimate of each rank, in rank order.
        is_upper_bound: Whether the writer compresses, so the files may be smaller than estimated.
    """

    ranks: tuple[RankEstimate, ...]
    is_upper_bound: bool = False

    @property
    def bytes(self) -> int:
        """Size of all files together in bytes, including the index."""
        return sum(rank.bytes for rank in self.ranks)

    @property
    def files(self) -> int:
        """Number of all files, including the index."""
        return sum(rank.files for rank in self.ranks)

    @property
    def index_bytes(self) -> int:
        """Size of the index in bytes."""
        return sum(rank.index_bytes for rank in self.ranks)

    @property
    def staging_bytes(self) -> int:
        """Size in bytes of the memory for the copy on the rank whose copy is largest."""
        return max(rank.staging_bytes for rank in self.ranks)

    @property
    def seconds(self) -> float | None:
        """Duration in seconds of the write on the slowest rank; None if it is None for some rank."""
        times = [rank.seconds for rank in self.ranks if rank.seconds is not None]
        return max(times) if len(times) == len(self.ranks) else None

    @property
    def waiting_seconds(self) -> float | None:
        """Time in seconds for which the rank that waits longest waits for the storage; None if it is None for some."""
        times = [rank.waiting_seconds for rank in self.ranks if rank.waiting_seconds is not None]
        return max(times) if len(times) == len(self.ranks) else None

    def __repr__(self) -> str:
        count = len(self.ranks)
        most = max(rank.bytes - rank.index_bytes for rank in self.ranks)
        # Data files and index apart, as the repr of what `save` returns counts data files only.
        data_bytes, files = self.bytes - self.index_bytes, self.files - sum(rank.index_bytes > 0 for rank in self.ranks)
        in_files = f"in {files:,} data file{'' if files == 1 else 's'}"
        text = f"{'at most ' * self.is_upper_bound}{printable_bytes(data_bytes)} {in_files}"
        if count > 1:
            text += f", up to {printable_bytes(most)} on each of {count:,} ranks"
        text += f", and an index of {printable_bytes(self.index_bytes)}"
        if self.staging_bytes:
            text += f", {printable_bytes(self.staging_bytes)} of memory for a copy"
        beyond = max(rank.waiting_bytes for rank in self.ranks)
        if beyond:
            wait = "" if self.waiting_seconds is None else f" (about {self.waiting_seconds:.3g} s)"
            text += f", training waits until {printable_bytes(beyond)} are written{wait}"
        return f"<Estimate: {text}{'' if self.seconds is None else f', about {self.seconds:.3g} s'}>"


@outside_compile
def estimate(
    state_dict: dict[str, Any],
    saver: EstimatingSaver | None = None,
    *,
    checkpoint_id: CheckpointId | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
) -> Estimate:
    """Estimate what a save of a state dict would write and need, without writing.

    The function runs all steps of a save, except that the bytes of large tensors are neither read, nor copied from a
    device, nor checksummed. So the sizes are those of the files that a save writes. Objects, and tensors below 64 KiB,
    are serialized as in a save.

    Args:
        state_dict: State dict as for `save`.
        saver: Asynchronous saver that will save the state dict, such as `dcp_async.AsyncSaver`, whose copy counts as
            staging memory; None for `save`, which makes no copy.
        checkpoint_id: Checkpoint id of the save, which selects the writer, and the earlier saves whose rate is used;
            the storage is not accessed. None for a local folder.
        storage_writer: Storage writer of the save, which is not changed; None for the one that `checkpoint_id` selects.
        planner: Save planner of the save; None for a `DefaultSavePlanner`.
        process_group: Process group of the ranks that save together; None for all ranks.
        no_dist: Whether this process saves alone, even if process groups exist.
        timeout_seconds: Time in seconds that a rank waits for the other ranks in one phase.

    Returns:
        The estimate, the same on all ranks. If the writer compresses, the sizes are those before compression, an upper
        bound. The seconds are those of the phase `write`, at the rate of each rank's last save of 1 MiB or more to a
        checkpoint id with the same scheme in this process; None if a rank has no such save.

    Raises:
        UnsupportedValueError: The class of the writer is not derived from `ByteStorageWriter`, or overrides its methods
            that write; or a tensor or object cannot be saved.
        CheckpointException: The estimate failed on at least one of several ranks; raised on every rank.

    Ranks: every rank of the group; collective.

    Example:
        ```python
        import torch
        from dcp_core import estimate

        found = estimate({"weight": torch.ones(1000, 1000), "step": 7})
        assert 4_000_000 < found.bytes < 4_010_000
        print(found)  # <Estimate: 3.82 MiB in 1 data file, and an index of 5.26 KiB>
        ```
    """
    refuse_path("estimate", saver, "saver")
    if saver is not None and not callable(getattr(saver, "bytes_to_stage", None)):
        raise TypeError(
            f"estimate(): a {type(saver).__name__} is no saver; a storage writer is passed as storage_writer="
        )
    coordinator = make_coordinator(process_group, no_dist=no_dist, timeout_seconds=timeout_seconds, errors=RANK_ERRORS)

    def prepare() -> tuple[dict[str, Any], tuple[int, int], ByteStorageWriter, bool]:
        values: dict[str, Any] = with_rank_values(with_states(state_dict), coordinator.rank)
        waiting = getattr(saver, "bytes_to_wait_for", lambda _: 0)
        staging = (0, 0) if saver is None else (saver.bytes_to_stage(values), waiting(values))
        writer = adopt_writer(storage_writer)
        if writer is None:
            writer = resolve_writer(None, checkpoint_id or _ANYWHERE)
        if not isinstance(writer, ByteStorageWriter):
            kind = type(writer).__qualname__
            raise UnsupportedValueError(f"{kind} writes files of its own: their sizes are not known before a save")
        return values, staging, writer.measuring(), writer.compresses

    with coordinator:
        prepared = []
        coordinator.all_gather("estimate", lambda: prepared.append(prepare()))
        values, (staging, waiting), writer, compresses = prepared[0]
        measure_with(coordinator, values, writer, planner)
        sizes = writer.measured_files()
        total = sum(sizes.values())
        rate = write_rate(checkpoint_id or writer.checkpoint_id)
        seconds = None if rate is None else total / rate
        wait = 0.0 if not waiting else None if rate is None else waiting / rate
        mine = RankEstimate(total, len(sizes), staging, seconds, sizes.get(METADATA_NAME, 0), waiting, wait)
        return Estimate(tuple(coordinator.all_gather("estimate", lambda: mine)), compresses)
