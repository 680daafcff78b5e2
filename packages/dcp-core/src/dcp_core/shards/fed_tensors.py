"""Tensors whose bytes are not in this process's memory, but come in pieces while they are written.

An asynchronous saver saves a state dict that is larger than its memory for copies in this way: it passes a `TensorFeed`
to `save_with`, and tensors in the state dict that only describe dtype, shape, strides and ties.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dcp_core.errors import UnsupportedValueError
from dcp_core.records.plan import WriteItem
from dcp_core.shards.shards import LocalTensor
from dcp_io.requests import Payload, PiecewiseData
from dcp_manifest.index.items import Framing

__all__ = ["FedTensors", "TensorFeed"]


class TensorFeed(Protocol):
    """Source of the bytes of tensors whose memory must not be read; called in the threads of a save."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether the bytes of a tensor come from this feed."""
        ...

    def expect(self, items: int) -> None:
        """Set the number of items of this rank that come from the feed. Called once, before the first `take`."""
        ...

    def take(self, tensor: torch.Tensor) -> PiecewiseData:
        """Return the row-major bytes of a tensor that the feed holds, or of a box of one. Called once for each item."""
        ...

    def abandon(self) -> None:
        """Make all waits for bytes raise: the write has failed."""
        ...


@dataclass(frozen=True, slots=True)
class _FedRequest:
    """Write request of an item whose bytes come from a feed; written before all others, as training waits for it."""

    key: str
    cost_bytes: int
    item: WriteItem
    fed: FedTensors
    urgent = True

    def resolve(self) -> Payload:
        return self.fed.payload(self.item)

    def abandon(self) -> None:
        self.fed.feed.abandon()


@dataclass(frozen=True, slots=True)
class FedTensors:
    """The tensors of one save that come from a feed.

    Args:
        feed: Source of the tensors' bytes.
        names: FQNs of the tensors.
        find: Function that returns the tensor of a write item, whose memory must not be read.
    """

    feed: TensorFeed
    names: frozenset[str]
    find: Callable[[WriteItem], torch.Tensor]

    @classmethod
    def of(cls, feed: TensorFeed, values: Mapping[str, Any], find: Callable[[WriteItem], torch.Tensor]) -> FedTensors:
        """Return the record for a flat state dict."""
        return cls(feed, frozenset(name for name, value in values.items() if _is_fed(feed, value)), find)

    def request(self, item: WriteItem) -> _FedRequest:
        """Return the write request of an item of one of the tensors."""
        return _FedRequest(item.index.fqn, item.chunk_bytes(), item, self)

    def payload(self, item: WriteItem) -> Payload:
        """Return the payload of an item, whose bytes come while they are written."""
        tensor = self.find(item)
        sizes = tuple(tensor.shape)
        if item.tensor_data is None or sizes != tuple(item.tensor_data.chunk.sizes):
            raise UnsupportedValueError(f"{item.index.fqn!r} was planned with other sizes than {sizes}")
        return Payload(self.feed.take(tensor), Framing.RAW, str(tensor.dtype).removeprefix("torch."), sizes)

    def check(self, item: WriteItem, value: object) -> None:
        """Raise UnsupportedValueError for a value that a storage writer wants as a whole."""
        if item.index.fqn in self.names and isinstance(value, torch.Tensor) and self.feed.holds(value):
            raise UnsupportedValueError(
                f"{item.index.fqn!r} is larger than the memory for copies, and this storage writer takes tensors as a "
                "whole: use a writer derived from ByteStorageWriter that does not replace write_data, or raise "
                "max_staging_bytes"
            )


def _is_fed(feed: TensorFeed, value: object) -> bool:
    if isinstance(value, LocalTensor):
        return any(feed.holds(shard.get()) for shard in value.shards)
    return isinstance(value, torch.Tensor) and feed.holds(value)
