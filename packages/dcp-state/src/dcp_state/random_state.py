"""State of the random number generators as a `Stateful`."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

from dcp_core.tensors.devices import device_module, devices_in_use


class RandomState:
    """State of the global random number generators: torch (CPU and accelerator), Python and, if it is imported, numpy.

    An accelerator's state covers the current device, and others on which this process has allocated memory. Every rank
    has its own state, which `app_state(…, random=RandomState())` keeps; in other state dicts, wrap it in `PerRank`.

    A rank that saved is restored bit by bit. Any other rank derives its state from its number and the state of rank
    (number modulo saved ranks): the same in each resume, and different from every other rank. `LoadReport.derived`
    lists it.

    Save the states of your own generators (`torch.Generator`, `numpy.random.default_rng`).

    Source: torch `get_rng_state`, and that of the device's module; Python `random.getstate`; numpy `random.get_state`.

    Example:
        ```python
        from dcp_core import PerRank, load, save
        from dcp_state import RandomState

        state = {"random": PerRank(RandomState())}
        save(state, checkpoint_id="step-1")
        load(state, checkpoint_id="step-1")  # sets the generators
        ```
    """

    def state_dict(self) -> dict[str, Any]:
        """Return name → state: `torch`, `python`, `numpy`, and of an accelerator `cuda`, `cuda_devices`, or like it."""
        version, words, gauss = random.getstate()
        state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": [version, list(words), gauss]}
        kind, module = _accelerator()
        if module is not None:
            state[kind] = module.get_rng_state()
            others = {number: module.get_rng_state(number) for number in _other_devices_in_use(module)}
            if others:
                state[f"{kind}_devices"] = others
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            kind, keys, *rest = numpy.random.get_state()
            state["numpy"] = [str(kind), [int(key) for key in keys], *rest]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the generators, of devices that exist."""
        torch.set_rng_state(state_dict["torch"].to("cpu", torch.uint8))
        version, words, gauss = state_dict["python"]
        random.setstate((version, tuple(words), gauss))
        kind, module = _accelerator()
        if module is not None and kind in state_dict:
            module.set_rng_state(state_dict[kind].to("cpu", torch.uint8))
            for number, state in state_dict.get(f"{kind}_devices", {}).items():
                if int(number) < module.device_count():
                    module.set_rng_state(state.to("cpu", torch.uint8), int(number))
        if "numpy" in state_dict:
            numpy = importlib.import_module("numpy")  # no dependency: only where the saved run had it
            kind, keys, *rest = state_dict["numpy"]
            numpy.random.set_state((kind, numpy.array(keys, numpy.uint32), *rest))

    def load_derived_state(self, state_dict: dict[str, Any], rank: int) -> None:
        """Seed the generators from a saving rank's state and this rank's number."""
        torch.default_generator.manual_seed(_derived_seed(state_dict["torch"], rank, "torch"))
        random.seed(_derived_seed(state_dict["python"], rank, "python"))
        kind, module = _accelerator()
        if module is not None and kind in state_dict:
            module.manual_seed_all(_derived_seed(state_dict[kind], rank, kind))
        if "numpy" in state_dict:
            numpy = importlib.import_module("numpy")
            seed = _derived_seed(state_dict["numpy"], rank, "numpy")
            numpy.random.seed([seed & 0xFFFFFFFF, seed >> 32])


def _accelerator() -> tuple[str, Any | None]:
    if not torch.accelerator.is_available():
        return "", None
    device = torch.device(str(torch.accelerator.current_accelerator()))
    return device.type, device_module(device)


def _other_devices_in_use(module: Any) -> list[int]:
    return [number for number in devices_in_use(module) if number != module.current_device()]


def _derived_seed(state: Any, rank: int, name: str) -> int:
    data = bytes(state.tolist()) if isinstance(state, torch.Tensor) else repr(state).encode()
    key = f"{name} {rank}".encode()
    return int.from_bytes(hashlib.blake2b(data, key=key, digest_size=8).digest(), "little") >> 1


@contextlib.contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Restore the generators of torch, Python and numpy at the end."""
    module = device_module(device)
    devices, kind = ([], "cuda") if module is None else ([device], device.type)
    python = random.getstate()
    numpy = sys.modules.get("numpy")
    of_numpy = numpy.random.get_state() if numpy is not None else None
    with torch.random.fork_rng(devices=devices, device_type=kind):
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(of_numpy)
