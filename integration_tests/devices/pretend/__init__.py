"""A pretend accelerator in host memory, on which missing waits, early reuse and reads by the host show as wrong values.

    from integration_tests.devices import pretend

    pretend.install()
    weights = torch.ones(3, device="pretend")
    with pretend.machine.scheduled(pretend.Schedule(chance=0.5, seed=7)):
        …

It is a device written in Python, of the kind that PyTorch calls PrivateUse1. The device of a process cannot be removed.
"""

from __future__ import annotations

import sys
from types import ModuleType

from torch.utils import backend_registration

from integration_tests.devices.pretend import collectives, operators
from integration_tests.devices.pretend.machine import NAME, Hold, Schedule, machine
from integration_tests.devices.pretend.memory import memory

__all__ = ["NAME", "Hold", "Schedule", "hold", "install", "is_possible", "machine", "memory"]

_installed: list[object] = []


def is_possible() -> bool:
    """Return whether this version of PyTorch lets Python be a device."""
    return hasattr(backend_registration, "_setup_privateuseone_for_python_backend")


def install(devices: int | None = None, schedule: Schedule | None = None) -> ModuleType:
    """Make devices (2) known to PyTorch, once, and the backend of their process groups; return `torch.pretend`.

    Raises RuntimeError if the devices are there, and are not those that the arguments ask for.
    """
    from integration_tests.devices.pretend import device

    if not _installed:
        machine.devices, machine.schedule = devices or machine.devices, schedule or machine.schedule
        backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=device)
        _installed.extend([operators.register(), collectives.register()])
    elif devices not in {None, machine.devices} or (schedule or machine.schedule) != machine.schedule:
        raise RuntimeError(f"{NAME} is installed, with {machine.devices} devices and {machine.schedule}")
    return sys.modules[f"torch.{NAME}"]


def hold(device: int = 0) -> Hold:
    """Keep this thread's stream busy until the returned object is released."""
    held = Hold()
    machine.launch(machine.current_stream(device), None, held)
    return held
