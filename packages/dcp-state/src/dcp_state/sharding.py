"""Conversion of whole tensors to shards and back, across ranks.

`broadcast_tensors` sends rank 0's state dict tensor by tensor, after all ranks checked names and shapes.
`convert_tensors` gathers whole tensors on every rank, or in pieces on rank 0 only. Each rank needs memory for its
result and one more tensor or piece.

Ranks exchange errors before and after a sequence of transfers. In between, a failed rank continues to communicate, with
scratch memory.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist

from dcp_core.errors import UnsupportedValueError
from dcp_core.shards.boxes import LocalBox, dtensor_boxes
from dcp_core.shards.shards import LocalShard, box_view, local_tensor, shard_method
from dcp_core.tensors.devices import group_device
from dcp_core.tensors.kinds import (
    children_of,
    clone_tensor,
    dtensor_layout,
    is_dtensor,
    is_wrapper,
    rebuilt,
    unwrapped,
    with_local,
)
from dcp_ranks import Coordinator, make_coordinator
from dcp_state.options import StateDictOptions
from dcp_state.report import StateMismatchError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

T = TypeVar("T")
PIECE_BYTES = 16 << 20


class Errors:
    """This rank's first error, until the other ranks are notified."""

    def __init__(self) -> None:
        self.first: Exception | None = None

    def attempt(self, function: Callable[[], T]) -> T | None:
        """Return the function's result; None if it raises an error, and after any error."""
        if self.first is not None:
            return None
        try:
            return function()
        except Exception as error:  # noqa: BLE001 - raised again on all ranks, when the stream is over
            self.first = error
            return None

    def tell(self) -> None:
        """Raise this rank's first error."""
        if self.first is not None:
            raise self.first


@contextmanager
def all_ranks(phase: str, *, alone: bool = False) -> Iterator[tuple[Coordinator, Errors]]:
    """Context manager for a sequence of tensor transfers; at its end, any rank's error is raised on all ranks.

    `Errors` wraps calls that may fail on one rank. Ranks: every rank of the job; collective, except with `alone`.
    """
    errors = Errors()
    with make_coordinator(no_dist=alone or not dist.is_initialized()) as coordinator:
        yield coordinator, errors
        coordinator.all_gather(phase, errors.tell)


def on_all_ranks(phase: str, function: Callable[[], T], options: StateDictOptions) -> T:
    """Return the function's result. With `broadcast_from_rank0`, any rank's error is raised on all ranks."""
    with all_ranks(f"broadcast from rank 0: {phase}", alone=not options.broadcast_from_rank0) as (_, errors):
        result = errors.attempt(function)
    return cast("T", result)  # which is None only if an error was raised


def box_of(fqn: str, whole: torch.Tensor, shard: LocalShard) -> torch.Tensor:
    """Return a shard's region of a whole tensor, as a view."""
    return box_view(whole, shard.offsets, shard.sizes, key=fqn)


def same_placement(value: DTensor, like: DTensor) -> bool:
    """Return whether two DTensors have the same boxes on each rank."""
    return dtensor_layout(value) == dtensor_layout(like)


def fill_shards(fqn: str, whole: torch.Tensor, target: torch.Tensor) -> None:
    """Copy this rank's shards of a whole tensor into a tensor of the same global shape."""
    held = local_tensor(fqn, target)
    if held is None:
        raise StateMismatchError(fqn, [f"{fqn}: a {type(target).__name__} cannot take a tensor"])
    with torch.no_grad():
        for shard in held.shards:
            shard.get().copy_(box_of(fqn, whole, shard))


def place(fqn: str, value: Any, like: Any) -> Any:
    """Return `value` with the sharding of the tensor `like`; shares memory with `value` if possible.

    StateMismatchError: the global shapes differ, or only `value` is sharded.

    Ranks: every rank with shards; collective only if both are sharded, and differently.
    """
    if not isinstance(value, torch.Tensor) or not isinstance(like, torch.Tensor):
        return value
    if is_dtensor(like):
        if is_dtensor(value):
            if same_placement(value, like):
                return value
            if value.device_mesh == like.device_mesh:
                _check(fqn, value)
                moved = value.redistribute(like.device_mesh, like.placements)
                # Redistribution does not take the order of `like`'s shards.
                return moved if same_placement(moved, like) else _shard(fqn, value.full_tensor(), like)
            raise StateMismatchError(fqn, [f"{fqn}: sharded over another device mesh; get it with full_state_dict"])
        return _shard(fqn, value, like) if value.shape == like.shape else value
    if is_dtensor(value):
        raise StateMismatchError(
            fqn, [f"{fqn}: is sharded here, but a plain tensor in the model; get it with full_state_dict=True"]
        )
    return value


def _shard(fqn: str, whole: torch.Tensor, like: DTensor) -> DTensor:
    held = local_tensor(fqn, like, allow_meta=True)
    shards = held.shards if held is not None else ()
    local_shape = like.to_local().shape
    is_one = len(shards) == 1 and tuple(shards[0].sizes) == tuple(local_shape)
    local = (
        box_of(fqn, whole, shards[0]) if is_one else torch.empty(local_shape, dtype=whole.dtype, device=whole.device)
    )
    made = with_local(like, local)
    if shards and not is_one:
        fill_shards(fqn, whole, made)
    return made


@dataclass(frozen=True, slots=True)
class _Sent:
    shape: torch.Size
    dtype: torch.dtype


def broadcast_model(
    known_tensors: Mapping[str, torch.Tensor],
    state_dict: Mapping[str, Any],
    problems: Callable[[Collection[str]], Iterable[str]],
    *,
    may_be_empty: bool = False,
) -> Callable[[], tuple[dict[str, Any], set[str]]]:
    """Return a function that fills a model's parameters and buffers in place from rank 0's state dict, by FQN.

    The function returns the values that are left (objects, meta tensors, unknown names), and the filled names.
    CheckpointException: names have `problems`, a shape differs, or a rank failed; raised on all ranks.

    Ranks: every rank; both calls are collective.
    """
    filled: set[str] = set()

    def target(name: str, sent: _Sent) -> torch.Tensor:
        known = known_tensors.get(name)
        if known is None:
            return torch.empty(sent.shape, dtype=sent.dtype, device="cpu")
        if known.is_meta:
            return torch.empty_like(known, device=group_device())
        filled.add(name)
        return known

    def check(header: Mapping[str, Any]) -> Iterator[str]:
        yield from problems(header)
        for name, sent in header.items():
            known = known_tensors.get(name)
            if known is not None and isinstance(sent, _Sent) and known.shape != sent.shape:
                yield f"{name!r} has the shape {tuple(sent.shape)} on rank 0, the model's is {tuple(known.shape)}"

    def fill() -> tuple[dict[str, Any], set[str]]:
        return {name: value for name, value in send().items() if name not in filled}, filled

    send = broadcast_tensors(lambda: state_dict, target, check, may_be_empty=may_be_empty)
    return fill


def broadcast_tensors(
    source: Callable[[], Mapping[str, Any]],
    target: Callable[[str, Any], torch.Tensor | None],
    problems: Callable[[Mapping[str, Any]], Iterable[str]],
    *,
    may_be_empty: bool = False,
) -> Callable[[], dict[str, Any]]:
    """Return a function that broadcasts rank 0's flat state dict to every rank.

    `source` returns name → whole tensor or object, on rank 0 only. `target`(name, value) returns a tensor or DTensor to
    fill, or None. `problems`(name → shape and dtype, or object) returns reasons why it does not fit. The function
    returns name → filled target, None for a tensor without target, or object; in rank 0's order.

    CheckpointException: a value does not fit, or a rank failed; raised on all ranks.

    Ranks: every rank of the default group; both calls are collective.
    """
    values: dict[str, Any] = {}

    def describe() -> dict[str, Any]:
        values.update(source())
        if not values and not may_be_empty:
            raise StateMismatchError("state dict of rank 0", ["it is empty; rank 0 must pass the full state dict"])
        return {
            name: _Sent(value.shape, value.dtype) if isinstance(value, torch.Tensor) else value
            for name, value in values.items()
        }

    def check() -> None:
        if found := [*problems(header)]:
            raise StateMismatchError("state dict of rank 0", found)

    def send() -> dict[str, Any]:
        with all_ranks("broadcast from rank 0: tensors") as (_, errors):
            return {
                name: _broadcast(name, sent, values.get(name), target, errors) if isinstance(sent, _Sent) else sent
                for name, sent in header.items()
            }

    with all_ranks("broadcast from rank 0: names") as (coordinator, _):
        header = coordinator.broadcast("broadcast from rank 0: names", describe)
        coordinator.all_gather("broadcast from rank 0: check", check)
    return send


def _broadcast(
    name: str,
    sent: _Sent,
    source: torch.Tensor | None,
    target: Callable[[str, Any], torch.Tensor | None],
    errors: Errors,
) -> torch.Tensor | None:
    device = group_device()
    prepared = None
    if source is not None:
        prepared = errors.attempt(lambda: source.detach().to(device).contiguous())
    # Where this fails there is nothing to take part with; the group's own timeout ends the wait of the others.
    buffer = torch.zeros(sent.shape, dtype=sent.dtype, device=device) if prepared is None else prepared
    if sent.shape.numel() and dist.is_initialized():
        dist.broadcast(buffer, src=0)

    def take() -> torch.Tensor | None:
        destination = target(name, sent)
        if destination is not None:
            fill_shards(name, buffer, destination)
        return destination

    return errors.attempt(take)


def convert_tensors(state_dict: dict[str, Any], options: StateDictOptions) -> dict[str, Any]:
    """Return a new state dict with tensors gathered, and moved to the CPU, according to the options.

    With both options, it is empty except on rank 0. CheckpointException: a rank failed; raised on all ranks.

    Ranks: with `full_state_dict`, every rank that holds shards; collective.
    """
    if not options.full_state_dict:
        return dict(map_tensors(state_dict, _to_cpu)) if options.cpu_offload else state_dict
    found = list(named_tensors(state_dict))
    sharded = [(name, value) for name, value in found if is_dtensor(value)]
    to_first = options.cpu_offload and dist.is_initialized()
    keeps = not to_first or dist.get_rank() == 0
    results: dict[int, torch.Tensor] = {}
    everyone = bool(sharded) and all(value.device_mesh.size() == dist.get_world_size() for _, value in sharded)
    with all_ranks("full state dict", alone=not everyone) as (coordinator, errors):
        for name, value in sharded:
            _check(name, value)
        described = [
            (name, tuple(value.shape), str(dtensor_layout(value)[1:]), _kind(value)) for name, value in sharded
        ]
        # A digest, as Python's own hash of a string is another one in each process.
        digest = hashlib.sha256(repr(described).encode()).hexdigest()
        coordinator.agree("full state dict: names", lambda: digest, "digests of names, shapes and shardings")
        for name, value in sharded:
            if _kind(value):
                whole = _by_class(name, value, errors)
            else:
                whole = _to_rank_0(name, value, errors) if to_first else _to_all(value, errors)
            if whole is not None and keeps:
                results[id(value)] = whole
    if not keeps:
        return {}
    finish: Callable[[torch.Tensor], Any] = _to_cpu if options.cpu_offload else (lambda tensor: tensor)
    return dict(map_tensors(state_dict, lambda tensor: finish(results.get(id(tensor), tensor))))


def _check(name: str, value: DTensor) -> None:
    """Raise if `full_tensor()` or shards would give other values."""
    if shard_method(value, "__create_chunk_list__") is not None:
        raise UnsupportedValueError(
            f"{name!r} describes its own shards, so it cannot be gathered to a whole tensor: save it without "
            "full_state_dict, and load whole tensors from the checkpoint"
        )
    dtensor_boxes(name, value, (0,) * value.device_mesh.ndim)


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Copy containers of PyTorch's pytree, with `function(tensor)` for each tensor."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {name: map_tensors(each, function) for name, each in value.items()}
    children = children_of(value)
    return value if children is None else rebuilt(value, [map_tensors(each, function) for _, each in children])


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield nested tensors with dotted names of keys and indices."""
    if isinstance(value, torch.Tensor):
        yield name, value
        return
    for key, each in children_of(value) or ():
        yield from named_tensors(each, f"{name}.{key}" if name else str(key))


def _to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu")


def _to_all(value: DTensor, errors: Errors) -> torch.Tensor | None:
    whole = value.full_tensor()
    return errors.attempt(whole.detach)


def _kind(value: DTensor) -> str:
    local = value._local_tensor  # noqa: SLF001 - to_local() builds an autograd node
    local = local.wait() if hasattr(local, "wait") else local
    return type(local).__qualname__ if is_wrapper(unwrapped(local)) else ""


def _by_class(name: str, value: DTensor, errors: Errors) -> torch.Tensor | None:
    """Gather on every rank: only the class knows how inner tensors form a whole."""
    try:
        whole = value.full_tensor()  # the class refuses on every rank, or on none
    except RuntimeError as error:  # NotImplementedError is one
        raise UnsupportedValueError(
            f"{name!r} has shards of class {_kind(value)}, which cannot be gathered: {error}; save it without "
            "full_state_dict, and load whole tensors from the checkpoint"
        ) from error
    return errors.attempt(lambda: clone_tensor(whole))  # its inner tensors may still wait for collectives


def _to_rank_0(name: str, value: DTensor, errors: Errors) -> torch.Tensor | None:
    """Gather on the CPU of rank 0 (None elsewhere); no communication if rank 0 holds no shard."""
    ranks = value.device_mesh.mesh.flatten().tolist()
    if 0 not in ranks:
        return None
    me = dist.get_rank()
    held = local_tensor(name, value)
    mine = {tuple(shard.offsets): shard.get() for shard in held.shards} if held is not None else {}
    whole = errors.attempt(lambda: torch.empty(value.shape, dtype=value.dtype, device="cpu")) if me == 0 else None
    for box, owner in _owners(name, value).items():
        if 0 < me != owner:
            continue
        part = mine.get(box.offsets)
        if me == 0 and owner == 0:
            if whole is not None and part is not None:
                box_view(whole, box.offsets, box.sizes, key=name).copy_(part)
        else:
            _send_or_receive(name, box, owner, part, whole, value)
    return whole


def _send_or_receive(
    name: str, box: LocalBox, owner: int, part: torch.Tensor | None, whole: torch.Tensor | None, value: DTensor
) -> None:
    """Move a box from its owner to rank 0, in pieces of whole rows."""
    rows = box.sizes[0] if box.sizes else 1
    row_bytes = max(1, value.element_size() * math.prod(box.sizes[1:]))
    step = max(1, PIECE_BYTES // row_bytes)
    device = value.to_local().device
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        shape = (stop - start, *box.sizes[1:]) if box.sizes else ()
        if dist.get_rank() == owner:
            piece = part if part is None or not box.sizes else part[start:stop]
            sent = torch.zeros(shape, dtype=value.dtype, device=device) if piece is None else piece.contiguous()
            dist.send(sent, dst=0)
            continue
        buffer = torch.empty(shape, dtype=value.dtype, device=device)
        dist.recv(buffer, src=owner)
        if whole is not None:
            target = box_view(whole, box.offsets, box.sizes, key=name)
            (target[start:stop] if box.sizes else target).copy_(buffer)


def _owners(name: str, value: DTensor) -> dict[LocalBox, int]:
    mesh = value.device_mesh.mesh
    owners: dict[LocalBox, int] = {}
    seen: set[tuple[int, ...]] = set()
    for coordinate in itertools.product(*map(range, mesh.shape)):
        _, boxes = dtensor_boxes(name, value, coordinate)
        for box in boxes:
            if box.offsets not in seen:
                seen.add(box.offsets)
                owners[box] = int(mesh[coordinate])
    return owners
