"""`get_state_dict` and `set_state_dict` beside stock's: many small parameters, AdamW, one process.

`python -m integration_tests.benchmarks.state_dicts [parameters] [rounds]` prints medians and a ratio; bar: 0.5.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from types import ModuleType
from typing import Any

import torch
from torch import nn

import dcp_state

__all__ = ["compare", "main"]


def _run(parameters: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A trained model of so many parameters, in blocks of ten."""
    block = [nn.Sequential(*(nn.Linear(8, 8) for _ in range(5))) for _ in range(parameters // 10)]
    model = nn.Sequential(*block)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _round(library: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[float, float]:
    """Seconds of one get and one set."""
    start = time.perf_counter()
    state = library.get_state_dict(model, optimizer)
    between = time.perf_counter()
    library.set_state_dict(model, optimizer, model_state_dict=state[0], optim_state_dict=state[1])
    return between - start, time.perf_counter() - between


def compare(parameters: int = 5000, rounds: int = 5) -> dict[str, float]:
    """Median seconds of each side, taken in turn, and `ratio`: ours ÷ stock's of both steps together."""
    from torch.distributed.checkpoint import state_dict as stock

    sides: dict[str, ModuleType] = {"ours": dcp_state, "stock": stock}
    runs = {name: _run(parameters) for name in sides}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for _ in range(rounds + 1):
        for name, library in sides.items():
            taken[name].append(_round(library, *runs[name]))
    figures: dict[str, float] = {}
    for name, pairs in taken.items():
        pairs = pairs[1:]  # the first warms up
        figures[f"{name} get"], figures[f"{name} set"] = (statistics.median(each) for each in zip(*pairs, strict=True))
        figures[name] = statistics.median(sum(pair) for pair in pairs)
    figures["ratio"] = figures["ours"] / figures["stock"]
    return figures


def main() -> None:
    """Print the figures."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name, value in compare(*map(int, sys.argv[1:])).items():
        print(f"{name:10} {value:.4f}")


if __name__ == "__main__":
    main()
