from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dcp_core.planning.save_planner import create_default_local_save_plan
from dcp_core.records.metadata import TensorProperties


def test_lazy_tensors_are_not_copied_by_a_plan():
    """`Tensor.is_pinned` copies a whole tensor to resolve its conjugation, on a device too."""

    called: list[str] = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), named=None):
            called.append(str(function))
            return function(*arguments, **(named or {}))

    lazy = torch.zeros(4, dtype=torch.complex64).conj()
    with Calls():
        create_default_local_save_plan({"conjugated": lazy, "negated": lazy.imag}, is_coordinator=True)
        TensorProperties.create_from_tensor(lazy)
    assert not [name for name in called if "clone" in name or "copy" in name or "empty" in name]
