"""Fingerprints of values: a short hash of their bits, and a short text for people."""

from __future__ import annotations

import hashlib
import pickle
from typing import Any

import numpy as np
import torch

PLAIN = (bool, int, float, complex, str, bytes, type(None))
_SHOWN = 48


def fingerprint(value: Any) -> str:
    """Return a hash of a value's bits, equal for equal values of the same type, dtype and shape.

    Values are tensors (of a DTensor, this rank's part), arrays, plain values, or containers of them.
    """
    found = hashlib.blake2b(digest_size=8)
    _add(found, value)
    return found.hexdigest()


def shorten(value: Any) -> str:
    """Return a short text for people."""
    if isinstance(value, torch.Tensor):
        if value.numel() == 1 and value.device.type != "meta":
            return repr(_local(value).reshape(-1)[0].item()) if _local(value).numel() else "nothing on this rank"
        return f"{str(value.dtype).removeprefix('torch.')}{[*value.shape]}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{[*value.shape]}"
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def _add(found: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        _add_tensor(found, value)
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        found.update(f"{value.dtype}{value.shape}".encode())
        found.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, dict):
        found.update(f"dict {len(value)}".encode())
        for key, inner in value.items():
            _add(found, key)
            _add(found, inner)
    elif isinstance(value, (list, tuple)):
        found.update(f"{type(value).__name__} {len(value)}".encode())
        for inner in value:
            _add(found, inner)
    elif isinstance(value, (set, frozenset)):
        found.update(f"set {sorted(map(fingerprint, value))}".encode())
    elif isinstance(value, PLAIN):
        found.update(f"{type(value).__name__} {value!r}".encode())
    else:
        found.update(pickle.dumps(value))


def _add_tensor(found: Any, tensor: torch.Tensor) -> None:
    local = _local(tensor)
    found.update(f"{local.dtype}{tuple(tensor.shape)}{tuple(local.shape)}".encode())
    if local.device.type == "meta":
        return
    if local.layout is not torch.strided:
        local = local.to_dense()
    flat = local.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    found.update(flat.view(torch.uint8).numpy().data)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    part = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    return part if isinstance(part, torch.Tensor) else tensor
