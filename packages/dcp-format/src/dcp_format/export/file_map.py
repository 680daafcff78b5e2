"""Map of an export's files, made by the coordinator: file, dtype and offset per tensor, and each file's header."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from dcp_core import SavePlan, TensorWriteData, WriteItem
from dcp_core.errors import DcpError, MissingKeyError, UnsupportedValueError
from dcp_core.state_dict.flatten import KeyMap
from dcp_core.storage.storage_writer import tensor_payload
from dcp_core.tensors.kinds import is_wrapper, plain_values
from dcp_format.content.changes import cast_dtype
from dcp_format.content.new_file import temporary_name
from dcp_format.safetensors.safetensors_header import build_header, code_of
from dcp_io import Payload
from dcp_manifest.index.columns import Framing
from dcp_manifest.index.dtypes import ITEM_BYTES


@dataclass(frozen=True, slots=True)
class ExportedTensor:
    """A whole tensor to export; `slices` name the slices along the first dimension that the file has instead."""

    fqn: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    slices: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def stored(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and sizes of the tensors in the file."""
        return [(name, self.shape[1:]) for name in self.slices] or [(self.name, self.shape)]


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Place of a tensor's data: temporary name of its file, byte offset in the file, dtype there."""

    file: str
    offset: int
    dtype: str


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file of an export.

    Attributes:
        temporary: Name until the export is complete; the final name where objects cannot be renamed.
        header: First bytes of the file, up to the data.
        tensors: The file's tensors, in the order of their data.
        starts: Byte offsets of the tensors' data in the file.
    """

    name: str
    temporary: str
    header: bytes
    tensors: Sequence[ExportedTensor]
    starts: Sequence[int] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)

    def places(self) -> dict[str, TensorPlace]:
        """Return FQN → place."""
        return {
            tensor.fqn: TensorPlace(self.temporary, start, tensor.dtype)
            for tensor, start in zip(self.tensors, self.starts, strict=True)
        }


def tensors_of(
    plans: Iterable[SavePlan],
    order: Sequence[str],
    *,
    dtype: torch.dtype | None = None,
    names: KeyMap | None = None,
    aliases: Iterable[str] = (),
    split: SplitNames | None = None,
) -> list[ExportedTensor]:
    """Return the whole tensors that the plans of all ranks write, those of `order` first.

    `aliases` are FQNs of tied tensors that are not written, which `names` may rename.
    """
    found: dict[str, ExportedTensor] = {}
    names, split = names or KeyMap(), split or SplitNames({})
    taken: dict[str, str] = {}
    for plan in plans:
        for item in plan.items:
            fqn = item.index.fqn
            if fqn in found:
                continue
            data = tensor_data_of(item)
            name = names.stored(fqn)
            slices = split.of(name, data.size[0] if data.size else None)
            for one in slices or (name,):
                if one in taken:
                    raise UnsupportedValueError(
                        f"{taken[one]!r} and {fqn!r} would both be named {one!r}: change `rename`"
                    )
                taken[one] = fqn
            kept = data.properties.dtype
            target = str(cast_dtype(kept, dtype)).removeprefix("torch.")
            code_of(target, fqn)
            found[fqn] = ExportedTensor(fqn, name, target, tuple(data.size), slices)
    _check_aliases(aliases, names, taken)
    unused = names.unused([*found, *aliases])
    if unused:
        raise MissingKeyError(f"rename: there is no tensor {unused[0]!r} in the state dict")
    if split.unused:
        raise MissingKeyError(f"split: there is no tensor {split.unused[0]!r} among the names in the files")
    ordered = {fqn: found[fqn] for fqn in order if fqn in found}
    return [*(ordered | found).values()]


def _check_aliases(aliases: Iterable[str], names: KeyMap, taken: dict[str, str]) -> None:
    """Raise UnsupportedValueError if another name of a tied tensor is the name of a tensor."""
    for alias in aliases:
        name = names.stored(alias)
        if taken.setdefault(name, alias) != alias:
            raise UnsupportedValueError(
                f"{taken[name]!r} and {alias!r}, another name of a tied tensor, would both be named {name!r}: change "
                "`rename`"
            )


def lay_out(
    name: str, tensors: Iterable[ExportedTensor], metadata: Mapping[str, str], *, renamed: bool = True
) -> PlannedFile:
    """Return a file with its header and offsets; larger element sizes come first, so that all tensors are aligned.

    `renamed` files have a temporary name until they are complete.
    """
    tensors = sorted(tensors, key=lambda tensor: -ITEM_BYTES.get(tensor.dtype, 0))
    header = build_header(
        [(name, tensor.dtype, shape) for tensor in tensors for name, shape in tensor.stored], metadata
    )
    starts, position = [], len(header)
    for tensor in tensors:
        starts.append(position)
        position += tensor.nbytes
    return PlannedFile(name, temporary_name(name) if renamed else name, header, tensors, starts)


class SplitNames:
    """Names of the slices of stacked tensors along their first dimension. Raises ValueError for a wrong pattern."""

    def __init__(self, split: Mapping[str, str]) -> None:
        self._rules: list[tuple[str, re.Pattern[str], str]] = []
        for pattern, names in split.items():
            if names.count("{}") != 1 or names.count("*") != pattern.count("*"):
                raise ValueError(
                    f"split={{{pattern!r}: {names!r}}}: the names of the slices need one {{}} for their number, and as "
                    "many * as the pattern of the tensor"
                )
            self._rules.append((pattern, re.compile(r"([^.]+)".join(map(re.escape, pattern.split("*")))), names))
        self._used: set[str] = set()

    def of(self, name: str, count: int | None) -> tuple[str, ...]:
        """Return the names of the `count` slices (None for a scalar); empty if the tensor stays whole."""
        for pattern, expression, names in self._rules:
            found = expression.fullmatch(name)
            if found is not None:
                if count is None:
                    raise UnsupportedValueError(f"split: {name!r} is one number, without slices: change {pattern!r}")
                self._used.add(pattern)
                parts = iter(found.groups())
                template = re.sub(r"\*", lambda _, parts=parts: next(parts), names)  # type: ignore[misc]
                return tuple(template.replace("{}", str(number)) for number in range(count))
        return ()

    @property
    def unused(self) -> list[str]:
        """Patterns that no tensor had."""
        return [pattern for pattern, _, _ in self._rules if pattern not in self._used]


def tensor_data_of(item: WriteItem) -> TensorWriteData:
    """Return an item's chunk and properties. Raises UnsupportedValueError if the item is not a tensor."""
    if item.tensor_data is None:
        raise UnsupportedValueError(f"{item.index.fqn!r} is no tensor, and safetensors holds tensors only")
    return item.tensor_data


def form_of(item: WriteItem) -> tuple[str, tuple[int, ...]]:
    """Return the name of the dtype and the sizes of the box that an item writes."""
    data = tensor_data_of(item)
    return str(data.properties.dtype).removeprefix("torch."), tuple(data.chunk.sizes)


def checked_payload(item: WriteItem, data: object) -> Payload:
    """Return the bytes of an item's tensor. Raises DcpError if its dtype or sizes are not as planned."""
    if not isinstance(data, torch.Tensor):
        raise UnsupportedValueError(f"the planner gave bytes for {item.index.fqn!r}; safetensors holds tensors")
    if is_wrapper(data):
        data = plain_values(item.index.fqn, data)
    payload = tensor_payload(item.index.fqn, data)
    dtype, sizes = form_of(item)
    if payload.framing is not Framing.RAW or (payload.dtype, payload.sizes) != (dtype, sizes):
        raise DcpError(
            f"{item.index.fqn!r} was planned as {dtype} of sizes {sizes} and resolved to {payload.dtype} of sizes "
            f"{payload.sizes}: safetensors needs to know before"
        )
    return payload
