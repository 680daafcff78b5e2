"""Consolidation of safetensors shards of several ranks into files of whole tensors, in bounded memory.

Source: torch 2.13 `torch.distributed.checkpoint._consolidate_hf_safetensors` (names, parameters,
assignment of files to ranks).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcp_base.schemes import file_path
from dcp_core.errors import DcpError, MissingKeyError
from dcp_format.checkpoints.checkpoint import stored_content
from dcp_format.content.content import TensorEntry
from dcp_format.content.new_file import sweep, temporary_name
from dcp_format.safetensors.complete_set import Stamp, fresh_name, save_id_of
from dcp_format.safetensors.safetensors_index import earlier_files, open_safetensors, shard_name
from dcp_format.safetensors.safetensors_write import Sizes, publish_files, sizes_of, write_tensor_file
from dcp_io import LocalStore
from dcp_ranks import Coordinator, make_coordinator

_INFLIGHT_BYTES = 16 << 20


def consolidate_safetensors_files(
    input_dir: str, output_dir: str, fqn_to_index_mapping: dict[str, int], num_threads: int = 1
) -> None:
    """Consolidate safetensors shards like `consolidate_safetensors_files_on_every_rank`, in this process alone.

    Raises:
        CorruptCheckpointError: A file is damaged, or a region of a tensor is in no file.
        MissingKeyError: The mapping names a tensor that no input file contains.
    """
    _consolidate(make_coordinator(no_dist=True), input_dir, output_dir, fqn_to_index_mapping, num_threads)


def consolidate_safetensors_files_on_every_rank(
    input_dir: str,
    output_dir: str,
    fqn_to_index_mapping: dict[str, int],
    num_threads: int = 1,
    process_group: Any = None,
) -> None:
    """Consolidate safetensors shards into files of whole tensors, with a Hugging Face index, on all ranks.

    The ranks take turns: the first file is rank 0's. No file gets its final name before all ranks have written theirs.

    Args:
        input_dir: Folder of the shards.
        output_dir: Folder for the whole files.
        fqn_to_index_mapping: Name of a tensor → number of its output file.
        num_threads: Number of files that a rank writes at the same time.
        process_group: The ranks; None for all ranks. Without `torch.distributed`, this process writes all files.

    Raises:
        CheckpointException: The consolidation failed on some rank; raised on every rank.

    Ranks: every rank of the group; collective.
    """
    _consolidate(make_coordinator(process_group), input_dir, output_dir, fqn_to_index_mapping, num_threads)


def _consolidate(
    coordinator: Coordinator, input_dir: str, output_dir: str, mapping: Mapping[str, int], threads: int
) -> None:
    plan: _Plan | None = None
    written: dict[str, str] = {}

    def write() -> tuple[dict[str, str], Sizes, Mapping[str, str]]:
        nonlocal plan
        plan = _Plan.of(input_dir, output_dir, mapping)
        mine = [*plan.entries][coordinator.rank :: coordinator.world_size]
        written.update({name: temporary_name(name) for name in mine})
        plan.write(written, threads)
        return written, sizes_of({name: plan.entries[name] for name in mine}), plan.metadata

    def publish(found: Sequence[tuple[Mapping[str, str], Sizes, Mapping[str, str]]]) -> None:
        sizes = {name: tensors for _, each, _ in found for name, tensors in each.items()}
        if plan is None or sizes != sizes_of(plan.entries) or any(of_rank != plan.metadata for *_, of_rank in found):
            raise DcpError(
                "the ranks wrote files that do not fit: pass one fqn_to_index_mapping on all ranks, and check that "
                f"all ranks see the same files in {input_dir} and {output_dir}"
            )
        plan.publish({name: place for places, *_ in found for name, place in places.items()})

    with coordinator:
        try:
            coordinator.all_reduce("consolidate safetensors files", write, publish)
        except BaseException:
            for place in written.values():
                LocalStore(file_path(output_dir)).delete(place)
            raise


@dataclass(frozen=True, slots=True)
class _Plan:
    folder: Path
    entries: Mapping[str, Sequence[TensorEntry]]
    """Name of a file → its tensors."""
    metadata: Mapping[str, str]

    @classmethod
    def of(cls, input_dir: str, output_dir: str, mapping: Mapping[str, int]) -> _Plan:
        input_dir, output_dir = file_path(input_dir), file_path(output_dir)
        source = open_safetensors(input_dir, ties=False)
        if Path(input_dir).resolve() == Path(output_dir).resolve():
            raise ValueError(f"{input_dir} cannot be consolidated into itself: choose another directory")
        content = stored_content(source.store, source.index)
        unknown = sorted(set(mapping) - content.tensors.keys())
        if unknown:
            raise MissingKeyError(f"fqn_to_index_mapping names {unknown[:4]}, which are not in {input_dir}")
        count = max(mapping.values(), default=1)
        names = {n: shard_name(n, count) for n in range(1, count + 1)}
        metadata = {"format": "pt"}
        earlier = {
            name for name in earlier_files(Path(output_dir)) if save_id_of(Path(output_dir), name) != source.save_id
        }
        if source.save_id is not None:
            names = {n: fresh_name(name, earlier, source.save_id) for n, name in names.items()}
            metadata.update(Stamp.next(Path(output_dir), source.save_id, count).metadata)
        files: dict[str, list[TensorEntry]] = {name: [] for name in names.values()}
        for name, entry in content.tensors.items():
            files[names[mapping.get(name, 1)]].append(entry)
        return cls(Path(output_dir), files, metadata)

    def write(self, temporary: Mapping[str, str], threads: int) -> None:
        if threads < 1:
            raise ValueError(f"num_threads={threads} must be at least 1")
        store = LocalStore(self.folder)
        store.make()
        sweep(store, self.entries.keys().__contains__)

        def write(pair: tuple[str, str]) -> None:
            name, place = pair
            with store.create(place) as sink:
                write_tensor_file(
                    sink, self.entries[name], self.metadata, max_inflight_bytes=_INFLIGHT_BYTES // threads
                )

        with ThreadPoolExecutor(threads, thread_name_prefix="dcp-consolidate") as pool:
            list(pool.map(write, temporary.items()))

    def publish(self, temporary: Mapping[str, str]) -> None:
        """Name all files after all were written, with an index: tensors that it lacks are not part of the model."""
        publish_files(LocalStore(self.folder), temporary, sizes_of(self.entries))
