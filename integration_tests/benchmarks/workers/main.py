"""The process that is measured: `python -m integration_tests.benchmarks.workers.main`.

It reads commands and writes answers as JSON lines over stdin and stdout; what libraries print goes to stderr. One
process may host several libraries of one environment: where their states would not fit into memory side by side.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from integration_tests.benchmarks.workers.contents import checksum, poison, read_specs, zero
from integration_tests.benchmarks.workers.contract import Library
from integration_tests.benchmarks.workers.meter import measure

__all__ = ["main"]

Reply = dict[str, Any]


class WrongValuesError(RuntimeError):
    """A load did not bring back what was saved."""


class Worker:
    """One rank: its state, and the libraries that save and load it."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}
        self.sums: list[int] = []
        self.ends: list[tuple[bytes, bytes]] = []

    def make(self, *, library: str, tensors: list[dict[str, Any]], seed: int) -> Reply:
        """Make the state, once."""
        module = _library(library)
        self.state = module.make(read_specs(tensors), seed=seed)
        memories = [module.as_bytes(value) for value in self.state.values()]
        self.sums, self.ends = checksum(memories), _ends(memories)
        return {"bytes": sum(map(len, memories))}

    def versions(self, *, libraries: list[str]) -> Reply:
        """What each library calls itself."""
        return {name: _library(name).version() for name in libraries}

    def save(self, *, library: str, folder: str, fsync: bool, options: dict[str, Any]) -> Reply:
        """Save, timed."""
        module = _library(library)
        call = partial(module.save, self.state, Path(folder), fsync=fsync, options=options)
        _barrier()
        return measure(call)

    def load(self, *, library: str, folder: str, options: dict[str, Any], check: str) -> Reply:
        """Load, timed; then see that the values came. `check`: `all` of them, or the `ends` of each tensor."""
        module = _library(library)
        memories = [module.as_bytes(value) for value in self.state.values()]
        (zero if check == "all" else poison)(memories)
        loaded: dict[str, Any] = {}

        def call() -> None:
            loaded.update(module.load(self.state, Path(folder), options=options) or {})

        _barrier()
        cost = measure(call)
        if loaded:
            memories = [module.as_bytes(loaded[name]) for name in self.state]
        right = checksum(memories) == self.sums if check == "all" else _ends(memories) == self.ends
        if loaded:  # what lies elsewhere did not bring the state's own values back
            for name, value in self.state.items():
                module.as_bytes(value)[:] = module.as_bytes(loaded[name])
        if not right:
            raise WrongValuesError("the loaded values differ from those that were saved")
        return cost


def _ends(memories: list[Any]) -> list[tuple[bytes, bytes]]:
    return [(bytes(memory[:1]), bytes(memory[-1:])) for memory in memories]


def _library(name: str) -> Library:
    module: Any = importlib.import_module(f"integration_tests.benchmarks.workers.{name}")
    return module  # type: ignore[no-any-return]


def _barrier() -> None:
    """All ranks start an operation together."""
    if "WORLD_SIZE" in os.environ:
        import torch.distributed as dist

        dist.barrier()


@contextlib.contextmanager
def _process_group() -> Iterator[None]:
    if "WORLD_SIZE" not in os.environ:
        yield
        return
    import torch.distributed as dist

    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()


def main() -> int:
    """Answer commands until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    worker = Worker()
    with _process_group():
        for line in sys.stdin:
            command = json.loads(line)
            act: Callable[..., Reply] = getattr(worker, command.pop("act"))
            try:
                reply = act(**command)
            except Exception as error:  # noqa: BLE001 - whatever a library raises is a result
                traceback.print_exc()
                reply = {"error": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(reply) + "\n")
            answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
