"""Replicas of a value on several ranks: digests, and errors if ranks disagree."""

from __future__ import annotations

import hashlib
import io
import itertools
import marshal
import pickle
import warnings
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from dcp_core.errors import PlanError
from dcp_core.planning.global_plan import plan_columns
from dcp_core.planning.stock_global_plan import check_coverage, create_default_global_save_plan
from dcp_core.records.metadata import MetadataIndex
from dcp_core.records.protocols import ReplicaKey, SavePlan, WriteItem
from dcp_core.tables.plan_columns import columns_of
from dcp_core.tensors.kinds import ArchivedTensor, hidden_parts, is_wrapper
from dcp_core.tensors.tensor_memory import INTEGERS, byte_view, contiguous, tensor_bytes

_SMALL_BYTES = 64 * 1024
_SAMPLES = 16
_LARGEST_SAMPLE_BYTES = 4096
_GATHERED_TENSORS = 256  # of at most 64 KiB each
_LARGEST_PICKLE_BYTES = 16 << 20
_LONG_STRING_BYTES = 128 * 1024  # longer than a frame of a pickle; a long string has none

_COMPARABLE = {int, bool, str, bytes, type(None)}


def same_value(one: Any, other: Any) -> bool:
    """Return whether types and bits are equal: 0.0 differs from -0.0, 1 from 1.0; NaN equals NaN.

    An object that cannot be pickled, or contains itself, equals only itself.
    """
    if one is other or type(one) is not type(other):
        return one is other
    if type(one) in _COMPARABLE:
        return bool(one == other)
    try:
        return value_bytes(one) == value_bytes(other)
    except Exception:  # noqa: BLE001 - pickling may raise anything
        return False


def value_bytes(value: Any, new_file: Callable[[], io.BytesIO] = io.BytesIO) -> bytes:
    """Return bytes that identify type and bits; raise if impossible."""
    data = b""
    for kind in (_Pickler, _SetPickler):
        into = new_file()
        pickler = kind(into, protocol=5)
        pickler.into = into
        pickler.fast = True  # repeats shared parts
        pickler.dump(value)
        data = into.getvalue()
        # A false match of the opcode is harmless: the slow pickler also identifies the value.
        if pickle.EMPTY_SET not in data and pickle.FROZENSET not in data:
            break
    return data


def value_digest(value: Any) -> bytes:
    """Return a digest; empty if an object cannot be pickled."""
    try:
        return hashlib.blake2b(value_bytes(value), digest_size=16).digest()
    except Exception:  # noqa: BLE001 - pickling may raise anything
        return b""


def replica_value_digest(value: Any) -> bytes:
    """Return `value_digest`; above 16 MiB, samples represent large parts, and still larger values have one digest."""
    for new_file in (_Bounded, _Sampled):
        try:
            return hashlib.blake2b(value_bytes(value, new_file), digest_size=16).digest()
        except OverflowError:
            continue
        except Exception:  # noqa: BLE001 - pickling may raise anything
            return b""
    return b"too large"


def fingerprint(plan: SavePlan, made_by: Hashable) -> bytes | None:
    """Return a plan's cache key; None if that takes long."""
    if type(plan) is not SavePlan:
        return None
    columns = columns_of(plan.items)
    table = columns.table
    facts = (
        repr(made_by),
        table.tensor_names,
        table.object_names,
        list(table.dtypes),
        plan.usable,
        plan.splittable,
        plan.aliases and list(plan.aliases.items()),
        None if plan.digests is None else list(plan.digests),
    )
    arrays = (
        *(table.tensor_dtype, table.tensor_flags, table.tensor_ndim, table.tensor_owner, table.tensor_shape),
        *(table.tensor_chunks, table.chunk_offsets, table.chunk_sizes, table.object_owner, columns.whole),
    )
    digest = hashlib.blake2b(marshal.dumps(facts, 2), digest_size=16)
    for array in arrays:
        digest.update(len(array).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(array).data)
    try:
        for extra in (plan.planner_data, plan.storage_data):
            digest.update(value_bytes(extra))
    except Exception:  # noqa: BLE001 - plans that cannot be pickled cannot be compared
        return None
    return digest.digest()


def replica_digests(tensors: Sequence[torch.Tensor], *, everything: bool) -> list[int | None]:
    """Return checksums for comparing replicas, whatever their strides; None if a tensor has no data.

    Unless `everything` is set, they are over 16 samples of tensors above 64 KiB, 1/1024 of the bytes. A device gathers
    its samples for one copy per 256 tensors.
    """
    digests: list[int | None] = []
    gathered: dict[torch.device, list[tuple[int, torch.Tensor]]] = defaultdict(list)
    for tensor in tensors:
        on_device = not (tensor.is_cpu or tensor.is_meta or everything or tensor.is_quantized or is_wrapper(tensor))
        if on_device:
            gathered[tensor.device].append((len(digests), tensor))
        digests.append(None if on_device or tensor.is_meta else _digest(tensor, everything=everything))
    for number, part in itertools.chain.from_iterable(map(_copied, gathered.values())):
        digests[number] = zlib.crc32(tensor_bytes(part))
    return digests


def _digest(tensor: torch.Tensor, *, everything: bool) -> int | None:
    if isinstance(tensor, ArchivedTensor):
        return zlib.crc32(tensor.archive) if everything else tensor.digest
    if tensor.is_quantized or is_wrapper(tensor):
        parts = replica_digests(hidden_parts(tensor), everything=everything)
        return None if None in parts or not parts else zlib.crc32(repr(parts).encode())
    if everything or tensor.nbytes <= _SMALL_BYTES:
        return zlib.crc32(tensor_bytes(contiguous(tensor.resolve_conj().resolve_neg().cpu())))
    return zlib.crc32(tensor_bytes(_sample(tensor)))


def _copied(waiting: Sequence[tuple[int, torch.Tensor]]) -> Iterator[tuple[int, torch.Tensor]]:
    for start in range(0, len(waiting), _GATHERED_TENSORS):
        numbers, tensors = zip(*waiting[start : start + _GATHERED_TENSORS], strict=True)
        parts = [byte_view(tensor) if tensor.nbytes <= _SMALL_BYTES else _sample(tensor) for tensor in tensors]
        yield from zip(numbers, torch.split(torch.cat(parts).cpu(), [*map(len, parts)]), strict=True)


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    size, step = _steps(tensor.numel(), tensor.itemsize)
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return contiguous(_elements(tensor, _positions(tensor.numel(), size, step))).view(torch.uint8)
    data = tensor.detach().view(-1).view(torch.uint8)
    size, step = size * tensor.itemsize, step * tensor.itemsize
    even = data.as_strided((_SAMPLES - 1, size), (step, 1), data.storage_offset())
    return torch.cat([even.reshape(-1), data[-size:]])


def _steps(count: int, item_bytes: int) -> tuple[int, int]:
    size = max(64, min(_LARGEST_SAMPLE_BYTES, count * item_bytes // (1024 * _SAMPLES))) // item_bytes
    return size, (count - size) // (_SAMPLES - 1)


def _positions(count: int, size: int, step: int) -> npt.NDArray[np.int64]:
    starts = np.append(np.arange(_SAMPLES - 1) * step, count - size)
    return (starts[:, None] + np.arange(size)).ravel()


def _elements(tensor: torch.Tensor, positions: npt.NDArray[np.int64]) -> torch.Tensor:
    if not (tensor.is_complex() or tensor.is_neg()):  # torch cannot index tensors of some dtypes
        tensor = tensor.view(INTEGERS[tensor.itemsize])
    at = tuple([torch.from_numpy(each) for each in np.unravel_index(positions, tuple(tensor.shape))])
    return tensor[at].resolve_conj().resolve_neg()


class _Elements:
    """Stand-in for a value in a pickle."""


class _Bounded(io.BytesIO):
    """File of a pickle of at most 16 MiB."""

    def write(self, data: Any) -> int:
        if self.tell() + len(memoryview(data)) > _LARGEST_PICKLE_BYTES:
            raise OverflowError
        return super().write(data)


class _Sampled(_Bounded):
    """File with samples of a pickle's long strings."""

    def write(self, data: Any) -> int:
        view = memoryview(data)
        if len(view) <= _LONG_STRING_BYTES:
            return super().write(data)
        at = _positions(len(view), *_steps(len(view), 1))
        super().write(len(view).to_bytes(8, "little") + np.frombuffer(view, np.uint8)[at].tobytes())
        return len(view)


class _Pickler(pickle.Pickler):
    into: io.BytesIO

    def reducer_override(self, obj: Any) -> Any:
        is_array = type(obj) is np.ndarray and not obj.dtype.hasobject
        if not is_array and (not isinstance(obj, torch.Tensor) or obj.layout is not torch.strided or obj.is_quantized):
            return NotImplemented
        elements: Any
        if isinstance(self.into, _Sampled) and obj.nbytes > _SMALL_BYTES:
            elements = _sample_array(obj) if is_array else replica_digests([obj.detach()], everything=False)
        elif isinstance(self.into, _Bounded) and obj.nbytes > _LARGEST_PICKLE_BYTES:
            raise OverflowError
        elif is_array:
            elements = obj.tobytes()
        else:
            elements = bytes(tensor_bytes(contiguous(obj.detach().resolve_conj().resolve_neg().cpu())))
        return _Elements, ("" if is_array else type(obj).__name__, str(obj.dtype), tuple(obj.shape), elements)


def _sample_array(array: npt.NDArray[Any]) -> bytes:
    positions = _positions(array.size, *_steps(array.size, array.itemsize))
    return array[np.unravel_index(positions, array.shape)].tobytes()


class _SetPickler(_Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if type(obj) in (set, frozenset):
            return type(obj).__name__, sorted(value_bytes(element) for element in obj)
        return None


Replicas = Literal["check", "raise", "ignore"]
_SHOWN_KEYS = 10


class DivergentReplicaWarning(UserWarning):
    """Replicas of a value differ between ranks; only the lowest rank's is saved."""


def dedup_save_plans(
    all_plans: Sequence[SavePlan],
    save_to_lowest_rank: bool = False,
    *,
    pinned_to_lowest: Iterable[str] = (),
) -> list[SavePlan]:
    """Return save plans in which exactly one rank writes each item.

    Items go to the rank with the fewest bytes, largest first; ties, `pinned_to_lowest`, and everything with
    `save_to_lowest_rank` go to the lowest rank. Items are cut if all their plans are `splittable`.

    Source: torch 2.13 `_dedup_save_plans.dedup_save_plans` (stock weighs a shard by its global tensor).
    """
    planned = plan_columns(
        all_plans, {}, complete=None, to_lowest_rank=save_to_lowest_rank, pinned_to_lowest=[*pinned_to_lowest]
    )
    if planned is None:
        raise explain_contradiction(all_plans, {}, complete=False)
    return planned[0]


def explain_contradiction(all_plans: Sequence[SavePlan], aliases: Collection[str], *, complete: bool) -> PlanError:
    """Return the error for inconsistent plans."""
    items: dict[MetadataIndex, tuple[int, WriteItem]] = {}
    kinds: dict[str, tuple[int, bool]] = {}
    try:
        for rank, plan in enumerate(all_plans):
            for item in columns_of(plan.items):
                if item.index.fqn not in aliases:
                    _check_kind(kinds, item, rank)
                    _check_same(*items.setdefault(item.index, (rank, item)), item, rank)
        _, metadata = create_default_global_save_plan([SavePlan([item for _, item in items.values()])])
        check_coverage(metadata.state_dict_metadata, complete=complete)
    except PlanError as error:
        return error
    return PlanError("the ranks' plans contradict each other")


def _check_kind(kinds: dict[str, tuple[int, bool]], item: WriteItem, rank: int) -> None:
    first_rank, is_tensor = kinds.setdefault(item.index.fqn, (rank, item.tensor_data is not None))
    if is_tensor != (item.tensor_data is not None):
        raise PlanError(
            f"{item.index.fqn!r} is a tensor on one rank and an object on another (ranks {first_rank}, {rank}); "
            "give them different names"
        )


def _check_same(first_rank: int, first: WriteItem, other: WriteItem, other_rank: int) -> None:
    if first is other or first.tensor_data == other.tensor_data:
        return
    mine, theirs = first.tensor_data, other.tensor_data
    if mine is None or theirs is None:
        return  # both are objects: see `_check_kind`
    if (mine.size, mine.chunk, mine.properties.dtype) != (theirs.size, theirs.chunk, theirs.properties.dtype):
        raise PlanError(
            f"{first.index.fqn!r} differs between ranks: {mine.properties.dtype} {tuple(mine.size)} on rank "
            f"{first_rank}, {theirs.properties.dtype} {tuple(theirs.size)} on rank {other_rank}; "
            "wrap values that belong to one rank in PerRank"
        )


def agreed_aliases(all_plans: Sequence[SavePlan]) -> dict[str, str]:
    """Return alias → written FQN for ties that all holders agree on."""
    proposed: dict[str, set[str]] = defaultdict(set)
    for plan in all_plans:
        for alias, target in (plan.aliases or {}).items():
            proposed[alias].add(target)
    pairs = {alias: targets.pop() for alias, targets in proposed.items() if len(targets) == 1}
    if not pairs:
        return {}
    for plan in all_plans:
        names = columns_of(plan.items).names()
        tied = plan.aliases or {}
        for alias, target in list(pairs.items()):
            if (alias in names or target in names) and (tied.get(alias) != target or target not in names):
                del pairs[alias]
    return {alias: target for alias, target in pairs.items() if target not in pairs}


def divergent_keys(all_plans: Sequence[SavePlan]) -> dict[str, list[int]]:
    """Return FQN → ranks that differ from the lowest."""
    first: dict[ReplicaKey, int] = {}
    divergent: dict[str, set[int]] = defaultdict(set)
    known: dict[int, list[str]] = {}  # ranks may share their digests
    for rank, plan in enumerate(all_plans):
        differ = known.get(id(plan.digests))
        if differ is None:
            differ = known[id(plan.digests)] = [
                key if isinstance(key, str) else key[0]
                for key, digest in (plan.digests or {}).items()
                if first.setdefault(key, digest) != digest
            ]
        for name in differ:
            divergent[name].add(rank)
    return {name: sorted(ranks) for name, ranks in divergent.items()}


def report_divergence(divergent: dict[str, list[int]], replicas: Replicas) -> None:
    """Warn (`check`), raise PlanError, or ignore, if replicas differ."""
    if not divergent or replicas == "ignore":
        return
    shown = "; ".join(f"{key!r} on ranks {ranks}" for key, ranks in list(divergent.items())[:_SHOWN_KEYS])
    more = f"; and {len(divergent) - _SHOWN_KEYS} more" if len(divergent) > _SHOWN_KEYS else ""
    text = (
        f"{len(divergent)} value(s) differ between ranks under one name, and only the lowest rank's is saved: "
        f"{shown}{more}. Wrap values that belong to one rank in PerRank, make DTensors of the shards of a tensor, and "
        "give different tensors, such as those of two pipeline stages or groups of experts, different names"
    )
    if replicas == "raise":
        raise PlanError(text)
    warnings.warn(text, DivergentReplicaWarning, stacklevel=3)
