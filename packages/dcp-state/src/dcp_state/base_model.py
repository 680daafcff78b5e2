"""The frozen values that a trainable-only checkpoint leaves out: their name and their digests.

The digest of a tensor is the CRC-32 (as in zip files) of its elements' bytes in row-major order, as a safetensors file
stores them. A CRC-32 can be put together from the CRC-32s of parts: each rank reads its own shards once, and sends 4
bytes for each. So no tensor is gathered, and the digest depends neither on sharding nor on the number of ranks. If a
single tensor differs, its digest is equal with a probability of 2^-32; digests of other tensors are independent of it.

The digest of a base is the SHA-256 of the lines `<FQN> <8 hexadecimal digits>`, sorted by FQN, cut to 128 bits.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dcp_base.escaping import printable
from dcp_core.errors import UnsupportedValueError
from dcp_core.shards.shards import LocalShard, local_tensor
from dcp_core.tensors.kinds import is_dtensor, is_wrapper, unwrapped
from dcp_core.tensors.tensor_memory import contiguous, tensor_bytes
from dcp_io.archives.crc import combine, crc32
from dcp_manifest.index.runs import box_runs
from dcp_state.canonical_names import ModelNames
from dcp_state.report import StateMismatchError
from dcp_state.sharding import all_ranks

_SHOWN, _SHOWN_NAME = 5, 200
_DIGEST = re.compile(r"[0-9a-f]{8}\Z")


@dataclass(frozen=True, slots=True)
class TrainableOnly:
    """Options of `app_state(…, trainable_only=…)`.

    Args:
        base: Name of the model that the frozen values come from, for messages; None for the `_name_or_path` of the
            model's `config`, if it has one.
        buffers: Whether persistent buffers are saved, such as running means.
        digest: Whether digests of the frozen values are saved, and compared in a load.

    Example:
        ```python
        import torch
        from dcp_state import TrainableOnly, app_state

        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
        model[0].requires_grad_(False)
        optimizer = torch.optim.AdamW(model[1].parameters())
        app = app_state(model, optimizer, trainable_only=TrainableOnly(base="my-encoder-v2"))
        assert list(app.state_dict()["model"]) == ["1.weight", "1.bias"]
        ```
    """

    base: str | None = None
    buffers: bool = True
    digest: bool = True


@dataclass(frozen=True, slots=True)
class BaseModel:
    """Name of a base model, and FQN → digest (8 hexadecimal digits) of its frozen values; None if unknown."""

    name: str | None = None
    tensors: Mapping[str, str] | None = None

    @property
    def digest(self) -> str | None:
        """The digest of all values: 32 hexadecimal digits."""
        if self.tensors is None:
            return None
        lines = "".join(f"{name} {self.tensors[name]}\n" for name in sorted(self.tensors))
        return hashlib.sha256(lines.encode(errors="surrogatepass")).hexdigest()[:32]

    def as_text(self) -> str:
        """Return the form in checkpoints: JSON."""
        tensors = None if self.tensors is None else dict(sorted(self.tensors.items()))
        return json.dumps({"name": self.name, "digest": self.digest, "tensors": tensors})

    @classmethod
    def from_text(cls, text: object) -> BaseModel:
        """Parse the form in checkpoints, and ignore unknown entries; StateMismatchError for another text or value."""
        try:
            read: Any = json.loads(text)  # type: ignore[arg-type]
            name, tensors = read["name"], read["tensors"]
            is_known = isinstance(name, str | None) and (tensors is None or all(map(_DIGEST.match, tensors.values())))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise _foreign_base(f"{type(error).__name__}: {error}") from error
        if not is_known:
            raise _foreign_base("a name or a digest has another form")
        return cls(name, tensors)

    def check(self, found: BaseModel, names: Collection[str] | None, *, strict: bool) -> None:
        """Raise StateMismatchError if the frozen values `found` in a model are not of this base.

        `names` are all names of the model, or None if this process has only a part of it.
        """
        if self.tensors is None or found.tensors is None:
            return
        differing = [name for name, digest in found.tensors.items() if self.tensors.get(name, digest) != digest]
        if differing:
            ours, its = (
                f"{printable((base.name or 'a base without a name')[:_SHOWN_NAME])} (digest {base.digest})"
                for base in (self, found)
            )
            problem = (
                f"the checkpoint was trained on {ours}, but {len(differing)} of {len(found.tensors)} frozen tensors of "
                f"this model differ: it has {its}. Load the base's values into the model before the checkpoint"
            )
            first = [f"{name!r}: saved {self.tensors[name]}, found {found.tensors[name]}" for name in differing]
            raise StateMismatchError("base model", [problem, *first[:_SHOWN]])
        if not strict:
            return
        unknown = [name for name in found.tensors if name not in self.tensors]
        gone = [] if names is None else [name for name in self.tensors if name not in names]
        problems = [
            f"{name!r} is frozen here, but was not when the checkpoint was saved: call requires_grad_() before the "
            "load, or use strict=False to keep the model's value"
            for name in unknown
        ]
        problems += [
            f"{name!r} is in the base {printable((self.name or 'of the checkpoint')[:_SHOWN_NAME])}, but not in this "
            "model"
            for name in gone
        ]
        if problems:
            raise StateMismatchError("base model", problems)


def _foreign_base(why: str) -> StateMismatchError:
    problem = (
        f"its entry 'base_model' describes no base model ({why}): trainable_only did not write it, or it is damaged"
    )
    return StateMismatchError("base model", [f"{problem}. Load another copy, or single values with load_keys"])


def name_of_base(model: nn.Module) -> str | None:
    """Return the `_name_or_path` of the first configuration in a model, which transformers sets."""
    for module in model.modules():
        config: Any = vars(module).get("config")
        if hasattr(config, "_name_or_path") and config._name_or_path:  # noqa: SLF001 - there is no public way
            return str(config._name_or_path)  # noqa: SLF001 - as above
    return None


def is_sharded(value: object) -> bool:
    """Return whether a rank holds a part of a value only."""
    held = local_tensor("", value, allow_meta=True)
    return held is not None and not held.whole


def frozen_names(names: ModelNames) -> set[str]:
    """Return the names of parameters without `requires_grad`."""
    frozen = {
        name for name, tensor in names.tensors.items() if isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    }
    for flat, members in names.joined.items():
        if not flat.requires_grad:
            frozen.update(members)
    return frozen


Parts = dict[tuple[int, ...], int]
"""Offsets of a box → the CRC-32 of the whole tensor if all other bytes were missing; see `_part`."""


@dataclass(slots=True)
class FrozenValues:
    """Digests of a model's frozen values, computed once, and again for values that have changed."""

    _known: dict[str, tuple[Hashable, Parts]] = field(default_factory=dict)
    _table: dict[str, str] = field(default_factory=dict)
    _of: frozenset[str] = frozenset()

    def agree(
        self,
        frozen: set[str],
        trained: set[str],
        values: Mapping[str, Any],
        names: Sequence[ModelNames],
        *,
        together: bool,
    ) -> tuple[set[str], bool]:
        """Return the names that are frozen on all ranks, and whether digests have to be computed.

        `frozen` have no `requires_grad`; those that are `trained` have optimizer state on this rank, and so do not
        count as frozen on any.

        Ranks: with `together`, every rank; collective.
        """
        own = frozen & trained
        stale = frozen - own != self._of or any(
            name not in self._known or self._known[name][0] != _mark(name, values[name], names)
            for name in _first_names(frozen - own, names)
        )
        if together:
            with all_ranks("frozen values: names") as (coordinator, _):
                answers = coordinator.all_gather("frozen values: names", lambda: (own, stale))
            own = set().union(*(names_of_rank for names_of_rank, _ in answers))
            stale = any(of_rank for _, of_rank in answers)
        return frozen - own, stale

    def compute(
        self, frozen: set[str], values: Mapping[str, Any], names: Sequence[ModelNames], *, together: bool
    ) -> None:
        """Compute `table`. Ranks: with `together`, every rank; collective."""

        def mine() -> dict[str, Parts]:
            parts = {}
            for name in _first_names(frozen, names):
                mark = _mark(name, values[name], names)
                if name not in self._known or self._known[name][0] != mark:
                    self._known[name] = mark, _parts(name, values[name])
                parts[name] = self._known[name][1]
            return parts

        if together:
            with all_ranks("frozen values: digests") as (coordinator, _):
                self._table = coordinator.all_reduce("frozen values: digests", mine, _merge)
        else:
            self._table = _merge([mine()])
        self._of = frozenset(frozen)

    @property
    def table(self) -> dict[str, str]:
        """FQN → digest, of the last computation."""
        return self._table

    def forget(self) -> None:
        """Forget the digests: the next call computes them."""
        self._known.clear()
        self._of = frozenset()


def _first_names(chosen: set[str], names: Sequence[ModelNames]) -> list[str]:
    return sorted(chosen - {alias for part in names for alias in part.aliases})


def _mark(name: str, value: Any, names: Sequence[ModelNames]) -> Hashable:
    """Return a value that changes with the tensor, as far as torch counts changes.

    FSDP1 has its values in flat parameters, whose counts change with the trainable ones in them.
    """
    tensor = next((part.tensors[name] for part in names if name in part.tensors), None)
    if tensor is None or any(adapter.gathers for part in names for adapter in part.adapters):
        held = local_tensor(name, value)
        return None if held is None else tuple(_sample(shard.get()) for shard in held.shards)
    local = unwrapped(tensor)
    if is_dtensor(local):
        local = local._local_tensor  # noqa: SLF001 - to_local() builds an autograd node
    if is_wrapper(local):
        return id(tensor)
    # Tensors that were made in inference mode have no counter.
    version = None if local.is_inference() else local._version  # noqa: SLF001
    return id(tensor), local.data_ptr(), version, _sample(local)


def _sample(tensor: torch.Tensor) -> tuple[int, ...]:
    # Torch does not count changes through `.data` or NumPy, such as those of merged adapters.
    if not tensor.is_contiguous() or tensor.is_quantized or tensor.is_meta:
        return ()
    data = tensor.detach().resolve_conj().resolve_neg().view(-1).view(torch.uint8)
    return tuple(data[:: data.numel() // 64 | 1].tolist())


def _parts(name: str, value: Any) -> Parts:
    held = local_tensor(name, value)
    if held is None:
        raise UnsupportedValueError(f"{name!r} is a frozen {type(value).__name__}, not a tensor: {_REMEDY}")
    return {tuple(shard.offsets): _part(name, shard, held.size) for shard in held.shards}


_REMEDY = "pass trainable_only=TrainableOnly(digest=False) to save no digests of frozen values"


def _part(name: str, shard: LocalShard, size: Sequence[int]) -> int:
    """Return a box's part of a tensor's CRC-32: the parts of all boxes, joined by XOR, are the CRC-32."""
    box = shard.get()
    if is_wrapper(box):
        raise UnsupportedValueError(f"{name!r} has the class {type(box).__name__}, whose bytes are unknown: {_REMEDY}")
    runs = box_runs(size, shard.offsets, shard.sizes, box.element_size())
    if not runs.run_bytes:
        return 0
    data = tensor_bytes(contiguous(box if box.is_cpu else box.to("cpu")))
    value, end, read = 0, 0, 0
    for start in runs.within(0, runs.stop)[0].tolist():
        value = combine(value, crc32(data[read : read + runs.run_bytes]), start + runs.run_bytes - end)
        end, read = start + runs.run_bytes, read + runs.run_bytes
    return combine(value, 0, math.prod(size) * box.element_size() - end)


def _merge(ranks: Sequence[Mapping[str, Parts]]) -> dict[str, str]:
    joined: dict[str, Parts] = {}
    for rank, tensors in enumerate(ranks):
        for name, parts in tensors.items():
            of_tensor = joined.setdefault(name, {})
            for offsets, part in parts.items():
                if of_tensor.setdefault(offsets, part) != part:
                    problem = f"frozen {name!r} has another value on rank {rank} than on a rank before it"
                    raise StateMismatchError("base model", [f"{problem}; load the same base on all ranks"])
    return {name: f"{_joined(parts):08x}" for name, parts in joined.items()}


def _joined(parts: Parts) -> int:
    value = 0
    for part in parts.values():
        value ^= part
    return value
