"""Map of an export's files: the file, dtype and byte offset of each tensor, and each file's header and size.

The coordinator makes it from the plans of all ranks; nothing is written here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from dcp_core import SavePlan
from dcp_core.errors import DuplicateKeyError, MissingKeyError
from dcp_core.toolkit import KeyMap
from dcp_format.content.changes import cast_dtype
from dcp_format.content.temporary_files import temporary_name
from dcp_format.export.items import tensor_data_of
from dcp_format.export.split_names import SplitNames
from dcp_format.safetensors.safetensors_header import build_header, code_of
from dcp_manifest import ITEM_BYTES

__all__ = ["ExportedTensor", "PlannedFile", "TensorPlace", "lay_out", "tensors_of"]


@dataclass(frozen=True, slots=True)
class ExportedTensor:
    """A whole tensor to export: its name in the state dict and in the file, its dtype in the file, its sizes.

    With `slices`, the file has a tensor of each of these names instead: the slices along the first dimension, whose
    bytes follow each other as those of the whole tensor do.
    """

    fqn: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    slices: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size of the tensor in the file, bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def stored(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and sizes of the tensors in the file."""
        return [(name, self.shape[1:]) for name in self.slices] or [(self.name, self.shape)]


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Place of a tensor's data: temporary name of its file, offset of its first byte in the file, dtype there."""

    file: str
    offset: int
    dtype: str


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file of an export.

    Attributes:
        name: Final name.
        temporary: Name until the export is complete; the final name where objects cannot be renamed.
        header: First bytes of the file, up to the data.
        tensors: The file's tensors, in the order of their data.
        starts: Offset of each tensor's data in the file, bytes.
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
        """Return FQN → place of each tensor in the file."""
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
    """Return the whole tensors that the plans of all ranks write.

    Args:
        plans: Final plans of all ranks; boxes of one tensor may be in several plans.
        order: FQNs in the wanted order; other tensors follow in the order of the plans.
        dtype: Dtype to which floating-point tensors are cast; None for none.
        names: Map from FQNs to names in the files; None for the FQNs.
        aliases: FQNs of tied tensors that are not written, which `names` may rename as well.
        split: Names of the slices of stacked tensors; None to split none.

    Raises:
        UnsupportedValueError: The format cannot hold a tensor's dtype.
        DuplicateKeyError: Two tensors would get the same name.
        MissingKeyError: `names` renames an FQN that is not there, or no tensor has a name that `split` wants.
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
                    raise DuplicateKeyError(f"{taken[one]!r} and {fqn!r} would both be named {one!r}: change `rename`")
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
    """Raise DuplicateKeyError if another name of a tied tensor is the name of a tensor in the files."""
    for alias in aliases:
        name = names.stored(alias)
        if taken.setdefault(name, alias) != alias:
            raise DuplicateKeyError(
                f"{taken[name]!r} and {alias!r}, another name of a tied tensor, would both be named {name!r}: change "
                "`rename`"
            )


def lay_out(
    name: str, tensors: Iterable[ExportedTensor], metadata: Mapping[str, str], *, renamed: bool = True
) -> PlannedFile:
    """Return a file with its header and offsets; larger element sizes come first, so that all tensors are aligned.

    Args:
        name: Final name of the file.
        tensors: The file's tensors.
        metadata: Pairs of strings for the header's `__metadata__`.
        renamed: Whether the file has a temporary name until it is complete.

    Raises:
        UnsupportedValueError: The format cannot hold a tensor's dtype, or the header would be too long.
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
