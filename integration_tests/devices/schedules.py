"""Random schedules of a training on a device: steps, streams, memory that comes and goes, saves and loads.

Each tensor is full of one number, which a mirror in Python knows: that of the time of the call is to be in each copy.
"""

from __future__ import annotations

import gc
import random
from concurrent.futures import Future
from typing import Any
from unittest.mock import patch

import torch

from dcp_async import DefaultStager, StagingOptions
from dcp_core import load, save
from dcp_core.errors import CorruptCheckpointError
from dcp_core.records.protocols import CheckpointId
from dcp_core.tensors import tensor_memory
from dcp_core.tensors.devices import pinned_buffer
from dcp_io import StoreBackend
from dcp_io.reading import read_plan
from dcp_io.writing import write_engine
from integration_tests.devices import pretend
from integration_tests.kits.memory import MemoryReader, MemoryWriter
from integration_tests.kits.memory_store import OBJECTS, MemoryStore

__all__ = ["WrongValueError", "search"]

_SIZES = {"large": 40_000, "columns": 40_000, "small": 64, "scalar": 1}
_PIECES_SIZE = 1 << 20  # read in several steps
_FOLDER = "schedule"


class WrongValueError(AssertionError):
    """A copy has other values than those of the call."""


class ThreadsWriter(MemoryWriter):
    """Writer whose threads copy from the device, each with streams of its own."""

    def _open(self, checkpoint_id: CheckpointId) -> StoreBackend:
        return StoreBackend(MemoryStore(str(checkpoint_id)), threads=2)


class ThreadsReader(MemoryReader):
    """Reader whose threads copy to the device."""

    def _open(self, checkpoint_id: CheckpointId) -> StoreBackend:
        return StoreBackend(MemoryStore(str(checkpoint_id)), threads=2)


class Training:
    """One training, whose calls come from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.device = f"{pretend.NAME}:{seed % 2}"
        self.module: Any = torch.get_device_module(pretend.NAME)
        self.values = dict.fromkeys(_SIZES, 0)
        self.tensors = {name: self.made(name, 0) for name in _SIZES}
        self.stager = DefaultStager(StagingOptions(use_pinned_memory=True, use_shared_memory=False))
        self.staged: list[tuple[dict[str, torch.Tensor], dict[str, int]]] = []

    def made(self, name: str, value: int) -> torch.Tensor:
        """Return a new tensor."""
        found = torch.full((_SIZES.get(name, _PIECES_SIZE),), float(value), device=self.device)
        return found.view(200, 200).t() if name == "columns" else found

    def step(self) -> None:
        """Change tensors in place."""
        for name, tensor in self.tensors.items():
            tensor.add_(1)
            self.values[name] += 1

    def replace(self) -> None:
        """Free a tensor, whose memory the next one gets."""
        name = self.random.choice([*_SIZES])
        self.values[name] += 100
        del self.tensors[name]
        self.tensors[name] = self.made(name, self.values[name])

    def change_stream(self) -> None:
        """Compute on another stream from here on, after the work of this one."""
        before = self.module.current_stream(self.device)
        after = self.random.choice([self.module.Stream(self.device), self.module.default_stream(self.device)])
        after.wait_stream(before)
        self.module.set_stream(after)

    def stage(self) -> None:
        """Copy to the host in a thread; steps go on once the copy is complete. Some copies are used for longer."""
        staged = self.stager.stage({**self.tensors})
        found = staged.result() if isinstance(staged, Future) else staged
        self.staged.append((found, dict(self.values)))
        self.step()
        for copy, expected in self.staged:
            self.check("staged", copy, expected)
        del self.staged[: self.random.randrange(3)]

    def save(self) -> None:
        """Save, and load into other tensors."""
        compression = self.random.choice([None, "zstd"])
        save({**self.tensors}, storage_writer=ThreadsWriter(_FOLDER, compression=compression))
        expected = dict(self.values)
        self.step()
        template = {name: self.made(name, -1) for name in _SIZES}
        load(template, storage_reader=ThreadsReader(_FOLDER))
        doubled = {name: tensor * 1 for name, tensor in template.items()}
        self.check("loaded", {name: tensor.cpu() for name, tensor in doubled.items()}, expected)

    def fail(self) -> None:
        """Fail to load, and use the memory of what was to be loaded into."""
        save({"pieces": self.made("pieces", 1)}, storage_writer=MemoryWriter(_FOLDER))
        name = next(name for name in OBJECTS if name.startswith(_FOLDER) and name.endswith(".distcp"))
        data = bytearray(OBJECTS[name])
        data[len(data) * 3 // 4] ^= 1
        OBJECTS[name] = bytes(data)
        template = {"pieces": self.made("pieces", -1)}
        buffers: list[torch.Tensor] = []  # kept, as CUDA's allocator keeps pinned memory

        def keep(nbytes: int) -> torch.Tensor:
            buffers.append(pinned_buffer(nbytes))
            return buffers[-1]

        with patch.object(tensor_memory, "pinned_buffer", keep), patch.object(read_plan, "STEP_BYTES", 1 << 20):
            try:
                load(template, storage_reader=MemoryReader(_FOLDER))
            except CorruptCheckpointError:
                del template
            else:
                raise AssertionError("a changed byte was loaded")
        gc.collect(1)
        others = {"pieces": self.made("pieces", -2)}
        self.module.current_stream(self.device).synchronize()
        pretend.machine.finish()
        self.check("new", {name: tensor.cpu() for name, tensor in others.items()}, {"pieces": -2})

    def check(self, what: str, found: dict[str, torch.Tensor], expected: dict[str, int]) -> None:
        """Raise WrongValueError for another value."""
        for name, value in expected.items():
            if not bool((found[name] == value).all()):
                raise WrongValueError(f"{what} {name!r} has {found[name].unique().tolist()[:4]}, not {value}")

    def run(self, calls: int) -> None:
        """Make random calls."""
        with self.module.stream(self.module.default_stream(self.device)):
            choice = [self.step, self.step, self.replace, self.change_stream, self.stage, self.save, self.fail]
            for _ in range(calls):
                self.random.choice(choice)()
            self.stage()
            self.save()
        self.staged.clear()
        self.stager.close()


def search(seeds: range, *, calls: int = 5) -> tuple[int, str] | None:
    """Return the first seed after which a value is wrong, and what was."""
    for seed in seeds:
        chance = (0.0, 0.3, 0.7)[seed % 3]
        with pretend.machine.scheduled(pretend.Schedule(chance, seed)), patch.object(write_engine, "FILE_MIN_BYTES", 1):
            try:
                Training(seed).run(calls)
            except WrongValueError as error:
                return seed, str(error)
            finally:
                pretend.machine.finish()
    return None
