"""The table of docs/disk-and-time.md, from `dcp_all.estimate`: `python -m integration_tests.docs.disk_and_time`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from dcp_all import estimate
from integration_tests.benchmarks.pages import replace_figures

__all__ = ["PAGE", "main", "table"]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "disk-and-time.md"
# Name, hosts, layers, width, width of keys and values, inner width, words of the vocabulary.
_MODELS = [
    ("Llama 2 7B", 1, 32, 4096, 4096, 11008, 32000),
    ("Llama 3 70B", 8, 80, 8192, 1024, 28672, 128256),
    ("Llama 3 405B", 128, 126, 16384, 1024, 53248, 128256),
]
_FAST, _SLOW = 2, 5  # checkpoints that the two tiers keep
_DISK, _SHARED = 3, 5  # GB per second: one host's disk, and the shared storage


def _state(layers: int, width: int, narrow: int, inner: int, words: int) -> dict[str, torch.Tensor]:
    """Float32 weights and Adam's moments on the meta device."""
    block = [(width, width)] * 2 + [(narrow, width)] * 2 + [(inner, width)] * 3 + [(width,)] * 2
    shapes = block * layers + [(words, width)] * 2 + [(width,)]
    return {f"{kind}.{i}": torch.empty(shapes[i], device="meta") for kind in "wmv" for i in range(len(shapes))}


def table() -> Iterator[str]:
    """Lines of Markdown."""
    yield "| model | one checkpoint | staging memory per host | disk per host | shared storage | save | copy |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for name, hosts, *dimensions in _MODELS:
        whole = estimate(_state(*dimensions), no_dist=True).bytes / 1e9
        share = whole / hosts
        sizes = (f"{size:,.0f} GB" for size in (whole, share, (_FAST + 1) * share, (_SLOW + 1) * whole))
        minutes = (f"{seconds / 60:.1f} min" for seconds in (share / _DISK, whole / _SHARED))
        yield f"| {' | '.join([f'{name}, hosts: {hosts}', *sizes, *minutes])} |"


def main() -> None:
    """Write the table into the page."""
    replace_figures(PAGE, "integration_tests.docs.disk_and_time", [*table()])


if __name__ == "__main__":
    main()
