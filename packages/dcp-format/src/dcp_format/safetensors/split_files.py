"""Split of tensors over several safetensors files: the file of each tensor, the file names, and the index."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from dcp_format.safetensors.complete_set import SUFFIX

__all__ = ["index_json", "shard_names", "split_by_size"]


T = TypeVar("T")


def split_by_size(entries: Iterable[T], shard_bytes: int, nbytes: Callable[[T], int]) -> list[list[T]]:
    """Split tensors, in order, into groups of at most `shard_bytes` bytes; a larger tensor gets a group of its own.

    Args:
        entries: The tensors.
        shard_bytes: Largest size of a group, bytes.
        nbytes: Function (tensor) → size in bytes.
    """
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes={shard_bytes} must be at least 1")
    groups: list[list[T]] = [[]]
    size = 0
    for entry in entries:
        if groups[-1] and size + nbytes(entry) > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += nbytes(entry)
    return groups


def shard_names(count: int) -> list[str]:
    """Return the file names that Hugging Face libraries expect for a model in `count` files."""
    if count == 1:
        return [f"model{SUFFIX}"]
    return [f"model-{number:05d}-of-{count:05d}{SUFFIX}" for number in range(1, count + 1)]


def index_json(files: Mapping[str, Iterable[tuple[str, int]]]) -> bytes:
    """Return the index of a Hugging Face folder as JSON.

    Args:
        files: Name of each file → names and sizes (bytes) of its tensors.
    """
    weight_map = {name: file for file, tensors in files.items() for name, _ in tensors}
    total = sum(size for tensors in files.values() for _, size in tensors)
    table = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return json.dumps(table, indent=2, ensure_ascii=False).encode() + b"\n"
