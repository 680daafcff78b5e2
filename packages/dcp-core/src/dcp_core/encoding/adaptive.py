"""`compression="adaptive"`: a save is compressed only if that does not make it slower, as far as is known.

What is known of a place (the parent folder of a checkpoint) is the rate at which its storage makes bytes durable, in
the last save or in the first 64 MiB of this one, and how fast and how far this rank's tensors are compressed, from
samples. In doubt nothing is compressed. Each rank chooses for itself.
"""

from __future__ import annotations

import bisect
import itertools
import os
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dcp_core.encoding.compression import CompressionPolicy
from dcp_io.requests import BlockEncoder, Payload, Writable

__all__ = ["AdaptiveChoice", "AdaptiveRequest", "adaptive_requests", "forget_rates"]

_PROBE_BYTES = 64 << 20
# In a smaller save, measuring would cost more than it could gain.
_PROBED_SAVE_BYTES = 4 * _PROBE_BYTES
# What takes less time says little about the storage.
_RATED_BYTES = 16 << 20
# Smaller items are never compressed.
_MIN_ITEM_BYTES = 4 << 10
_PROBE_ITEM_BYTES = 16 << 20
_SAMPLES = 4
# Encoding and write-back overlap, except for a part of the shorter one; measured with 2 threads.
_NOT_OVERLAPPED = 0.25
_DOUBT = 0.95
# Whole saves encode slower than samples: other work and other threads take processor time. Measured: 0.25 to 0.9.
_SAMPLED = 0.6
# Below this share of a save in the final wait for the storage, it was not the storage that took the time.
_WAITING = 0.3


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of a place: rates in bytes per second, before compression where it is about encoding."""

    durable: float | None
    encode: float | None = None
    share: float = 1.0
    """Compressed size ÷ size."""
    waits: bool = True
    """Whether the save had to wait for the storage."""


_known: dict[tuple[str, int], _Known] = {}


def forget_rates() -> None:
    """Forget what is known of all places, so that the next save to each is a first one."""
    _known.clear()


class AdaptiveChoice:
    """Choice of one save on one rank; also the `dcp_io.requests.RateGauge` of the write.

    Args:
        policy: Transforms that may be applied.
        place: URL of the checkpoint.
        nbytes: Size of all items of this rank, before compression.
        threads: Limit of the number of writer threads.
    """

    def __init__(self, policy: CompressionPolicy, place: str, nbytes: int, threads: int) -> None:
        self._policy, self._nbytes = policy, nbytes
        self._place = (place.rstrip("/").rpartition("/")[0], threads)
        self._before = _known.get(self._place, _Known(None))
        self._durable, self._encode, self._share = self._before.durable, self._before.encode, self._before.share
        self._source = "the last save"
        self.measures = self._durable is None and nbytes >= _PROBED_SAVE_BYTES
        """Whether the rate of the storage is measured during the write, as it is not known."""
        self.compresses: bool | None = None
        """Whether items are compressed from now on; None as long as that is open."""
        self.report = "not compressed: the rate of the storage is not known yet"
        """What was chosen, and why."""
        self.file_bytes: int | None = None
        """After how many bytes of each file the storage is measured; None for not at all."""
        self._files = self._workers = 1
        self._lock = threading.Lock()
        self._notes: list[float] = []
        self._waits = self._before.waits
        self._longer = 0.0
        self._samples: list[tuple[int, float, float]] = []
        self._sampling_seconds: dict[int, float] = defaultdict(float)  # by thread
        self._encoding_seconds = self._closing_seconds = 0.0
        self._encoded_bytes = 0

    def begin(self, files: int) -> None:
        """Prepare for a write to this number of files, each in a thread of its own."""
        self._files, self._workers = files, min(files, len(os.sched_getaffinity(0)))
        if self.measures:
            self.file_bytes = _PROBE_BYTES // files
            self._source = f"the first {_PROBE_BYTES >> 20} MiB"
        elif self._durable is None:
            self.report = (
                "not compressed: the rate of the storage is not known yet, and less than "
                f"{_PROBED_SAVE_BYTES >> 20} MiB are too few to measure it"
            )
        with self._lock:
            self._decide()

    def note(self, nbytes: int, write_seconds: float, sync_seconds: float) -> None:
        """Record how long a file took for its first bytes: to write them, and then until they were durable."""
        write_seconds -= self._sampling_seconds[threading.get_ident()]
        with self._lock:
            # Later in the file, one goes on beside the other.
            self._notes.append(nbytes / max(write_seconds, sync_seconds, 1e-9))
            self._longer += sync_seconds - write_seconds
            if len(self._notes) == self._files:
                self._durable, self._waits = sum(self._notes), self._longer > 0
            self._decide()

    def close(self, sync_seconds: float) -> None:
        """Record how long a file took from its last write until it was durable."""
        with self._lock:
            self._closing_seconds += sync_seconds

    def apply(self, key: str, payload: Payload) -> Payload:
        """Return an item's payload as it is to be written. Called in the writer threads."""
        samples = not self.compresses and len(self._samples) < _SAMPLES
        if not samples and not self.compresses:
            return payload
        begun = time.perf_counter()
        encoded = self._policy.apply(key, payload)
        if samples:
            self._sample(payload, encoded)
            self._sampling_seconds[threading.get_ident()] += time.perf_counter() - begun
        if not self.compresses or encoded.blocks is None:
            return payload
        return replace(encoded, blocks=_Timed(encoded.blocks, self))

    def encoded(self, nbytes: int, seconds: float) -> None:
        """Count the time for encoding one block."""
        with self._lock:
            self._encoded_bytes += nbytes
            self._encoding_seconds += seconds

    def end(self, stored_bytes: int, seconds: float) -> None:
        """Record what a successful write has shown of the place, for the next save."""
        if self._nbytes < _RATED_BYTES:
            return
        seconds -= sum(self._sampling_seconds.values()) / self._files
        durable: float | None = stored_bytes / max(seconds, 1e-9)
        encode, share = self._encode, self._share
        waits = self._closing_seconds >= _WAITING * self._files * seconds
        if self._encoding_seconds:
            encode = self._encoded_bytes / self._encoding_seconds * self._workers
            if not waits:
                durable = None  # the storage may be much faster: the next save measures
        _known[self._place] = _Known(durable, encode, share, waits)

    def _sample(self, payload: Payload, encoded: Payload) -> None:
        """Measure how fast and how far an item is compressed, at some of its blocks.

        The fastest block counts: whatever else a block's time shows, such as waiting for a processor, is in `_SAMPLED`.
        """
        if not isinstance(payload.data, bytes | memoryview):
            return
        size, seconds, share = len(payload.data), 0.0, 1.0
        if encoded.blocks is not None:
            step = encoded.blocks.block_bytes
            view = memoryview(payload.data)
            encoded.blocks.encode(view[:step])  # allocates
            costs, lengths, taken = [], 0, 0
            for quarter in range(1, 4):
                start = size * quarter // 4 // step * step
                block = view[start : start + step]
                begun = time.perf_counter()
                lengths += len(encoded.blocks.encode(block))
                costs.append((time.perf_counter() - begun) / len(block))
                taken += len(block)
            seconds, share = min(costs), min(1.0, lengths / taken)
        with self._lock:
            self._samples.append((size, seconds, share))
            total = sum(each[0] for each in self._samples)
            cost = sum(each[0] * each[1] for each in self._samples) / total
            self._share = sum(each[0] * each[2] for each in self._samples) / total
            self._encode = _SAMPLED * self._workers / cost if cost else None
            self._decide()

    def _decide(self) -> None:
        if self.compresses is not None or self._durable is None:
            return
        if not self._waits:
            self.compresses = False
            rate = f"{self._durable / 1e6:,.0f} MB/s ({self._source})"
            self.report = f"not compressed: saves hardly wait for the storage, at {rate}"
            return
        if self._encode is None:
            if self._samples:
                self.report = "not compressed: samples of the tensors do not shrink"
            return
        plain, encoding, writing = 1 / self._durable, 1 / self._encode, self._share / self._durable
        compressed = max(encoding, writing) + _NOT_OVERLAPPED * min(encoding, writing)
        self.compresses = compressed < _DOUBT * plain
        self.report = (
            f"{'' if self.compresses else 'not '}compressed: the storage takes {self._durable / 1e6:,.0f} MB/s "
            f"({self._source}), and {self._workers} threads compress {self._encode / 1e6:,.0f} MB/s to "
            f"{self._share:.0%}; estimated time {compressed / plain:.2f} × that without"
        )


class AdaptiveRequest:
    """A write request whose payload is compressed if an `AdaptiveChoice` says so when the item is written."""

    __slots__ = ("_choice", "_request", "abandon", "cost_bytes", "key", "urgent")

    def __init__(self, request: Writable, choice: AdaptiveChoice) -> None:
        self._request, self._choice = request, choice
        self.key, self.cost_bytes = request.key, request.cost_bytes
        self.urgent: bool = getattr(request, "urgent", False)
        self.abandon = getattr(request, "abandon", None)

    def resolve(self) -> Payload:
        """Return the payload of the request, with or without transforms."""
        return self._choice.apply(self.key, self._request.resolve())


def adaptive_requests(requests: Sequence[Writable], choice: AdaptiveChoice) -> list[Writable]:
    """Return the requests, wrapped if their items may be compressed; where a save measures, smaller items are first."""
    found = [
        each if each.cost_bytes < _MIN_ITEM_BYTES or getattr(each, "alike", None) else AdaptiveRequest(each, choice)
        for each in requests
    ]
    small = [each for each in found if isinstance(each, AdaptiveRequest) and each.cost_bytes <= _PROBE_ITEM_BYTES]
    small.sort(key=lambda each: -each.cost_bytes)
    sizes = list(itertools.accumulate(each.cost_bytes for each in small))
    if choice.measures and sizes and sizes[-1] >= 2 * _PROBE_BYTES:
        # What a thread has begun before its measurement is over is not compressed: that should be no large item.
        for each in small[: bisect.bisect(sizes, 2 * _PROBE_BYTES) + 1]:
            each.urgent = True
    return list(found)


class _Timed:
    """Encoder of blocks that counts its time."""

    def __init__(self, encoder: BlockEncoder, choice: AdaptiveChoice) -> None:
        self._encoder, self._choice = encoder, choice
        self.block_bytes, self.descriptors = encoder.block_bytes, encoder.descriptors

    def encode(self, block: memoryview) -> bytes | bytearray | memoryview:
        begun = time.perf_counter()
        data = self._encoder.encode(block)
        self._choice.encoded(len(block), time.perf_counter() - begun)
        return data
