"""`broadcast_from_rank0`: sends rank 0's state dict tensor by tensor; each rank keeps its shards.

Before the first tensor is sent, all ranks get and check the names and shapes: for a state dict that does not fit,
every rank raises an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dcp_state.errors import StateMismatchError
from dcp_state.sharding.placing import fill_shards
from dcp_state.sharding.together import Errors, all_ranks

__all__ = ["broadcast_model", "broadcast_tensors"]


@dataclass(frozen=True, slots=True)
class _Sent:
    """Description of a tensor to broadcast."""

    shape: torch.Size
    dtype: torch.dtype


def broadcast_model(
    known_tensors: Mapping[str, torch.Tensor], state_dict: Mapping[str, Any], *, may_be_empty: bool = False
) -> tuple[dict[str, Any], set[str]]:
    """Fill a model's parameters and buffers with the values of the same FQNs in rank 0's state dict.

    Args:
        known_tensors: Parameters and buffers to fill in place.
        state_dict: Whole tensors and objects; used on rank 0 only.
        may_be_empty: Whether rank 0 may have nothing to send.

    Returns:
        A state dict for `load_state_dict` of the values that could not be copied in place (objects, tensors on the meta
        device or with unknown names); and the set of names that were filled.

    Raises:
        CheckpointException: A shape differs, or a rank failed; raised on all ranks.

    Ranks: every rank; collective.
    """
    filled: set[str] = set()

    def target(name: str, sent: _Sent) -> torch.Tensor:
        known = known_tensors.get(name)
        if known is None:
            return torch.empty(sent.shape, dtype=sent.dtype, device="cpu")
        if known.is_meta:
            return torch.empty_like(known, device=_device())
        filled.add(name)
        return known

    def problem(name: str, sent: _Sent) -> str | None:
        known = known_tensors.get(name)
        if known is None or known.shape == sent.shape:
            return None
        return f"{name!r} has the shape {tuple(sent.shape)} on rank 0, the model's is {tuple(known.shape)}"

    received = broadcast_tensors(lambda: state_dict, target, problem, may_be_empty=may_be_empty)
    return {name: value for name, value in received.items() if name not in filled}, filled


def broadcast_tensors(
    source: Callable[[], Mapping[str, Any]],
    target: Callable[[str, Any], torch.Tensor | None],
    problem: Callable[[str, Any], str | None],
    *,
    may_be_empty: bool = False,
) -> dict[str, Any]:
    """Broadcast rank 0's flat state dict to every rank.

    Args:
        source: Function that returns name → whole tensor or object; called on rank 0 only. Its errors are raised on all
            ranks.
        target: Function (name, value) → tensor or DTensor to fill on this rank; None if this rank does not need the
            tensor.
        problem: Function (name, shape and dtype of a tensor) → the reason why the tensor does not fit; None if it fits.
        may_be_empty: Whether rank 0 may have nothing to send.

    Returns:
        Name → filled target, None for a tensor without target, or object; in rank 0's order.

    Raises:
        CheckpointException: A value does not fit, or a rank failed; raised on all ranks.

    Ranks: every rank of the default group; collective. Takes memory for one tensor besides the targets.
    """
    results: dict[str, Any] = {}
    values: dict[str, Any] = {}

    def describe() -> dict[str, Any]:
        values.update(source())
        if not values and not may_be_empty:
            raise StateMismatchError("state dict of rank 0", ["it is empty; rank 0 must pass the full state dict"])
        return _describe(values)

    with all_ranks("broadcast from rank 0: tensors") as (coordinator, errors):
        header = coordinator.broadcast("broadcast from rank 0: names", describe)

        def check() -> None:
            found = [problem(name, sent) for name, sent in header.items() if isinstance(sent, _Sent)]
            if problems := [each for each in found if each is not None]:
                raise StateMismatchError("state dict of rank 0", problems)

        coordinator.all_gather("broadcast from rank 0: check", check)
        for name, sent in header.items():
            if isinstance(sent, _Sent):
                results[name] = _broadcast(name, sent, values.get(name), target, errors)
            else:
                results[name] = sent
    return results


def _describe(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _Sent(value.shape, value.dtype) if isinstance(value, torch.Tensor) else value
        for name, value in values.items()
    }


def _broadcast(
    name: str,
    sent: _Sent,
    source: torch.Tensor | None,
    target: Callable[[str, Any], torch.Tensor | None],
    errors: Errors,
) -> torch.Tensor | None:
    device = _device()
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


def _device() -> torch.device:
    """Return the device on which the default group can broadcast."""
    on_gpu = dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
