"""`compression="adaptive"`: compress the saves to a place only if that makes them faster.

A place is the parent directory of checkpoints. Each rank measures its own saves as a whole, and chooses for itself:

1. The first save to a place in this process is plain. Its writer threads also encode a few blocks as samples, and
   measure how long they waited for a processor.
2. Later saves are of the faster kind, in bytes per second before compression: the best of the last three plain saves
   against the last compressed save. Samples give the first estimate.
3. After eight compressed saves one is plain, because the storage may have become faster.

Compression must win by 5 %. See docs/decisions/0029.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dcp_base.logs import library_logger
from dcp_core.encoding.compression import CompressedRequest, CompressionPolicy

if TYPE_CHECKING:
    from dcp_io import Payload, StoreBackend, Writable
    from dcp_manifest.index.stored_items import StoredItems

_log = library_logger(__name__)
# The time of a smaller save says little about the storage; it is never compressed.
_MIN_SAVE_BYTES = 64 << 20
# Smaller items are never compressed.
_MIN_ITEM_BYTES = 4 << 10
_SAMPLES = 8
_PLAIN_RATES = 3
_COMPRESSED_IN_A_ROW = 8
_DOUBT = 0.95
# Encoding and write-back overlap, except for a part of the shorter one; measured with 2 threads.
_NOT_OVERLAPPED = 0.25


@dataclass(slots=True)
class _Place:
    plain: deque[float] = field(default_factory=lambda: deque(maxlen=_PLAIN_RATES))
    compressed: float | None = None
    encode: float = 0.0
    """Seconds to encode one byte with all threads, from samples."""
    share: float = 1.0
    """Compressed size ÷ size, from samples."""
    compressed_in_a_row: int = 0
    last_choice: bool | None = None

    def choose(self) -> tuple[bool, str]:
        if not self.plain:
            return False, "the rate of the storage is not known yet"
        if self.compressed_in_a_row >= _COMPRESSED_IN_A_ROW:
            return False, f"the rate of plain saves is measured again after {_COMPRESSED_IN_A_ROW} compressed ones"
        plain = max(self.plain)
        rate, source = self.compressed, "compressed ones made"
        if rate is None:
            writing = self.share / plain
            rate = 1 / (max(self.encode, writing) + _NOT_OVERLAPPED * min(self.encode, writing))
            source = f"by samples, compressed ones to {self.share:.0%} of the size would make"
        reason = f"plain saves made {plain / 1e6:,.0f} MB/s; {source} {rate / 1e6:,.0f} MB/s"
        return plain < _DOUBT * rate, reason

    def record(self, rate: float, *, compressed: bool) -> None:
        if compressed:
            self.compressed = rate
            self.compressed_in_a_row += 1
        else:
            self.plain.append(rate)
            self.compressed_in_a_row = 0


_places: dict[str, _Place] = {}


class AdaptiveCompression(CompressionPolicy):
    """Compress like `auto` if that makes saves faster, else write items unchanged."""

    def __init__(self) -> None:
        super().__init__("auto")

    def write(self, backend: StoreBackend, requests: Sequence[Writable], *, prefix: str, save_id: str) -> StoredItems:
        """Write items, compressed or not, and measure the time."""
        nbytes = sum(request.cost_bytes for request in requests)
        if nbytes < _MIN_SAVE_BYTES:
            return backend.write(requests, prefix=prefix, save_id=save_id)
        parent = backend.url.rstrip("/").rpartition("/")[0]
        place = _places.setdefault(parent, _Place())
        compresses, reason = place.choose()
        level = logging.DEBUG if compresses is place.last_choice else logging.INFO
        _log.log(level, "saves to %s are %s: %s", parent, "compressed" if compresses else "not compressed", reason)
        place.last_choice = compresses
        samples: dict[int, _Sample] = {}
        if compresses:
            requests = [
                CompressedRequest(each, self) if each.cost_bytes >= _MIN_ITEM_BYTES else each for each in requests
            ]
        elif place.compressed is None:
            samples = _samples(self, requests, nbytes)
            requests = [
                CompressedRequest(each, samples[n]) if n in samples else each for n, each in enumerate(requests)
            ]
        begun = time.perf_counter()
        stored = backend.write(requests, prefix=prefix, save_id=save_id)
        place.record(nbytes / max(time.perf_counter() - begun, 1e-9), compressed=compresses)
        if samples:
            count = sum(each.weight for each in samples.values())
            workers = min(backend.threads, len(os.sched_getaffinity(0)))
            place.encode = sum(each.weight * each.seconds_per_byte for each in samples.values()) / count / workers
            place.share = sum(each.weight * each.share for each in samples.values()) / count
        return stored


def _samples(policy: CompressionPolicy, requests: Sequence[Writable], nbytes: int) -> dict[int, _Sample]:
    ends = list(itertools.accumulate(request.cost_bytes for request in requests))
    count = min(_SAMPLES, nbytes // _MIN_SAVE_BYTES)
    weights = Counter(bisect.bisect(ends, nbytes * (2 * n + 1) // (2 * count)) for n in range(count))
    return {position: _Sample(policy, weight) for position, weight in weights.items()}


class _Sample(CompressionPolicy):
    """Write one item unchanged, after encoding one of its blocks to see the cost; it counts as `weight` samples."""

    def __init__(self, policy: CompressionPolicy, weight: int) -> None:
        super().__init__(None)
        self._policy = policy
        self.weight = weight
        self.seconds_per_byte = 0.0
        self.share = 1.0

    def apply(self, key: str, payload: Payload) -> Payload:
        encoder = self._policy.apply(key, payload).blocks
        if encoder is not None:
            block, step = payload.data, encoder.block_bytes
            if isinstance(block, bytes | memoryview):
                middle = len(block) // 2 // step * step
                block = memoryview(block)[middle : middle + step]
            else:
                block = next(iter(block.pieces(step)))
            begun = time.perf_counter()
            self.share = min(1.0, len(encoder.encode(block)) / len(block))
            self.seconds_per_byte = (time.perf_counter() - begun) / len(block) * _slowdown()
        return payload


def _slowdown() -> float:
    """Return this thread's time ÷ its processor time."""
    try:
        ran, waited, _ = map(int, Path("/proc/thread-self/schedstat").read_text().split())
    except (OSError, ValueError):  # a kernel without these counters
        return 1.0
    return (ran + waited) / max(ran, 1)
