"""Kinds of values in a state dict: containers, DTensors, wrapper and quantized tensors, records as tensors, dtypes.

Wrapper tensors, such as torchao's quantized weights, keep their elements in other tensors; each shard is stored as a
`torch.save` archive, or as a plain tensor if the class is transparent, as for float8 training (decision record 0027). A
quantized tensor (`torch.qint8`, …) is stored with its quantizer. DTensors are recognized without importing
`torch.distributed.tensor`, which takes long.

Source: torch 2.13 `torch.utils._pytree`.
"""

from __future__ import annotations

import collections
import contextlib
import io
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dcp_core.errors import UnsupportedValueError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

SCALARS = frozenset({int, float, bool, str, type(None)})
"""Classes whose objects can always be saved, and loaded everywhere."""
_LEAVES = SCALARS | {complex, bytes, torch.Tensor, torch.nn.Parameter}
_SEQUENCES = (list, tuple, collections.deque)


def children_of(value: Any) -> list[tuple[Any, Any]] | None:
    """Return (position, key or attribute; child) pairs of a container, or None."""
    if type(value) in _LEAVES:
        return None
    if _is_sequence(value):
        return list(enumerate(value))
    if isinstance(value, Mapping):
        return list(value.items())
    leaves, spec = pytree.tree_flatten(value, is_leaf=lambda node: node is not value)
    if spec.is_leaf():
        return None
    keys: Iterable[Any] = range(len(leaves))
    if not isinstance(value, _SEQUENCES):
        with contextlib.suppress(ValueError):  # registered without keys
            found, _ = pytree.tree_flatten_with_path(value, is_leaf=lambda node: node is not value)
            keys = [_key(path[0], number) for number, (path, _) in enumerate(found)]
    return list(zip(keys, leaves, strict=True))


def _is_sequence(value: object) -> bool:
    return isinstance(value, list) or (isinstance(value, tuple) and not hasattr(value, "_fields"))


def _key(entry: Any, number: int) -> Any:
    return next((getattr(entry, name) for name in ("name", "key", "idx") if hasattr(entry, name)), number)


def rebuilt(value: Any, children: Iterable[Any]) -> Any:
    """Return a container of the same class with other children."""
    if _is_sequence(value):
        return type(value)(children)
    if isinstance(value, Mapping) and type(value) not in pytree.SUPPORTED_NODES:
        return dict(zip(value, children, strict=True))
    _, spec = pytree.tree_flatten(value, is_leaf=lambda node: node is not value)
    return pytree.tree_unflatten(list(children), spec)


FIELDS = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
_METHODS = {"__create_write_items__", "__create_chunk_list__"}
_GET_SHARD = "__get_tensor_shard__"
DESCRIBING = frozenset({*FIELDS, *_METHODS, _GET_SHARD, "_st_info"})


def described_like(source: torch.Tensor, copied: torch.Tensor) -> torch.Tensor:
    """Copy shard attributes; UnsupportedValueError if a method provides the data."""
    attributes = source.__dict__
    if attributes and not DESCRIBING.isdisjoint(attributes):
        if _GET_SHARD in attributes:
            raise UnsupportedValueError(
                f"a tensor of shape {tuple(source.shape)} has the method {_GET_SHARD}, so it cannot be copied by this "
                "stager: use async_save of dcp_async with its own stager and planner, or save"
            )
        for name in DESCRIBING & attributes.keys():
            setattr(copied, name, attributes[name])
    return copied


class TensorLike:
    """Base class of records that replace a tensor."""

    __slots__ = ()


_MODULE = "torch.distributed.tensor"


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Return whether an object is a DTensor, without the import."""
    module = sys.modules.get(_MODULE)
    kind = None if module is None else getattr(module, "DTensor", None)
    return kind is not None and isinstance(value, kind)


def as_dtensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the DTensor behind a DDP parameter's `_st_info`, sharing its memory."""
    spec = tensor.__dict__.get("_st_info")
    if spec is None:
        return tensor
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - already imported if a spec exists

    return DTensor(tensor.detach(), spec, requires_grad=tensor.requires_grad)  # type: ignore[no-untyped-call]


def dtensor_layout(value: DTensor) -> tuple[Hashable, ...]:
    """Return a key that is equal for DTensors with the same boxes on each rank."""
    # A placement equals one of a subclass, whose layout may differ; a later spec may compare fewer fields than it has.
    spec: Any = value._spec  # noqa: SLF001 - has no public form
    return (spec.mesh, *map(type, spec.placements), spec.placements, *_other_fields(type(spec))(spec))  # type: ignore[arg-type]


@lru_cache
def _other_fields(kind: type[Any]) -> Callable[[Any], tuple[Hashable, ...]]:
    names = sorted({each.name for each in fields(kind)} - {"mesh", "placements", "tensor_meta"})
    return lambda spec: tuple([getattr(spec, name) for name in names])


def with_local(like: DTensor, local: torch.Tensor) -> DTensor:
    """Return a DTensor with another local tensor, of any device and dtype."""
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - already imported if a DTensor exists

    # `DTensor.from_local` drops the shard order, and moves the tensor to the mesh's device.
    spec = like._spec  # noqa: SLF001 - has no public form
    meta = spec.tensor_meta
    if meta is not None and meta.dtype != local.dtype:
        spec = replace(spec, tensor_meta=meta._replace(dtype=local.dtype))
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_TRANSPARENT = {
    "torchao.float8.fsdp_utils.WeightWithDynamicFloat8CastTensor": "_tensor",
    "torchao.prototype.moe_training.tensor.Float8TrainingWeightWrapperTensor": "_data",
    "torchao.prototype.moe_training.tensor.MXFP8TrainingWeightWrapperTensor": "_data",
    "torchao.prototype.quantized_training.bitnet.BitNetTrainingLinearWeight": "_data",
    "torchao.prototype.quantized_training.int8_mixed_precision.Int8MixedPrecisionTrainingLinearWeight": "_data",
}
"""Transparent class → attribute with an inner tensor of equal shape, dtype and values."""


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return a transparent class's inner tensor."""
    kind = type(tensor)
    while kind not in _PLAIN and (name := _TRANSPARENT.get(f"{kind.__module__}.{kind.__qualname__}")) is not None:
        tensor = getattr(tensor, name)
        kind = type(tensor)
    return tensor


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Return whether a tensor, not a DTensor, keeps its memory in others."""
    if type(tensor) in _PLAIN:
        return False
    if isinstance(tensor, ArchivedTensor) or is_traceable_wrapper_subclass(tensor):
        return True
    try:
        tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return True
    return False


class ArchivedTensor(torch.Tensor):
    """Staged form of wrapper and quantized tensors."""

    archive: bytes
    digest: int | None

    @staticmethod
    def __new__(
        cls, archive: bytes, sizes: torch.Size, dtype: torch.dtype, digest: int | None = None
    ) -> ArchivedTensor:
        """Return the stand-in."""
        make: Any = torch.Tensor._make_wrapper_subclass  # noqa: SLF001
        made: ArchivedTensor = make(cls, sizes, dtype=dtype, device="cpu")
        made.archive, made.digest = archive, digest
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].archive, args[0].size(), args[0].dtype, args[0].digest)
        raise NotImplementedError(f"{func} is not possible: the tensor was already serialized for a save")


def archive_wrapper(key: str, tensor: torch.Tensor) -> io.BytesIO:
    """Return a wrapper's archive."""
    if isinstance(tensor, ArchivedTensor):
        return io.BytesIO(tensor.archive)
    buffer = io.BytesIO()
    try:
        with torch.no_grad():
            torch.save(_on_cpu(tensor.detach()), buffer)
    except Exception as error:
        raise UnsupportedValueError(
            f"{key!r} is a {type(tensor).__qualname__}, which cannot be serialized: {error}; save the tensors that "
            "hold its values, or a plain tensor with the same values"
        ) from error
    return buffer


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    if not is_wrapper(tensor):
        tensor = tensor.detach().cpu()
        return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
    if not is_traceable_wrapper_subclass(tensor):
        return tensor.detach().cpu()
    inner, _ = _inner(tensor)
    moved = {name: _on_cpu(each) for name, each in inner.items()}
    if all(_is_same(moved[name], getattr(tensor, name)) for name in inner):
        return tensor
    made = _rebuilt(tensor, moved)
    return made if made.is_cpu else made.cpu()  # some contexts contain the device


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one is other or is_wrapper(one) or type(one) is not type(other):
        return one is other
    return one.device == other.device and one.data_ptr() == other.data_ptr()


def _inner(tensor: Any) -> tuple[dict[str, torch.Tensor], Any]:
    if is_traceable_wrapper_subclass(tensor):
        names, context = tensor.__tensor_flatten__()
        return {name: _waited(getattr(tensor, name)) for name in names}, context
    inner = {name: value for name, value in vars(tensor).items() if isinstance(value, torch.Tensor)}
    return inner, {name: value for name, value in vars(tensor).items() if name not in inner}


def _waited(tensor: Any) -> torch.Tensor:
    return tensor.wait() if hasattr(tensor, "wait") else tensor  # type: ignore[no-any-return]


def _rebuilt(tensor: Any, inner: dict[str, torch.Tensor]) -> torch.Tensor:
    made: torch.Tensor = type(tensor).__tensor_unflatten__(
        inner, tensor.__tensor_flatten__()[1], tensor.size(), tensor.stride()
    )
    return made


def clone_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached copy, also without `clone`."""
    if is_dtensor(tensor) and is_wrapper(tensor._local_tensor):  # noqa: SLF001
        return with_local(tensor, clone_tensor(tensor._local_tensor))  # noqa: SLF001
    if is_dtensor(tensor) or type(tensor) in _PLAIN or not is_traceable_wrapper_subclass(tensor):
        return tensor.detach().clone()
    return _rebuilt(tensor, {name: clone_tensor(each) for name, each in _inner(tensor)[0].items()})


def zeros_like(key: str, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a meta wrapper's zeroed copy."""
    try:
        made = _zeros_like(tensor, device)
    except Exception as error:
        raise UnsupportedValueError(
            f"{key!r} is a {type(tensor).__qualname__} on the meta device, which cannot be created on {device}: "
            f"{error}; load into an empty dict in place of the state dict, and pass the result to "
            "`load_state_dict(…, assign=True)`"
        ) from error
    return made


def _zeros_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if type(tensor) in _PLAIN:
        return torch.zeros_like(tensor, device=device)
    if not is_traceable_wrapper_subclass(tensor):
        raise TypeError(f"{type(tensor).__qualname__} has no __tensor_flatten__")
    made = _rebuilt(tensor, {name: _zeros_like(each, device) for name, each in _inner(tensor)[0].items()})
    if made.device != device:
        raise TypeError(f"its context names the device {made.device}")
    return made


def zero_tensor(tensor: torch.Tensor) -> None:
    """Set all elements to 0."""
    for part in _parts(tensor):
        part.zero_()


def _parts(tensor: Any) -> Iterator[torch.Tensor]:
    if is_dtensor(tensor):
        tensor = tensor._local_tensor  # noqa: SLF001
    if not is_wrapper(tensor):
        yield tensor
        return
    for each in _inner(tensor)[0].values():
        yield from _parts(each)


def hidden_parts(tensor: Any) -> list[torch.Tensor]:
    """Return the plain tensors in which a wrapper or quantized tensor keeps its values; none if unknown."""
    if tensor.is_quantized:
        scheme = _scheme(tensor)
        if scheme in _OF_TENSOR:
            scale = torch.tensor([tensor.q_scale(), tensor.q_zero_point()], dtype=torch.float64, device="cpu")
            return [tensor.int_repr(), scale]
        if scheme in _OF_CHANNELS:
            return [tensor.int_repr(), tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()]
        return []
    return [*_parts(tensor)] if is_traceable_wrapper_subclass(tensor) else []


def _have_one_form(one: Any, other: Any) -> bool:
    if type(one) in _PLAIN or type(other) in _PLAIN:
        return type(one) is type(other) and (one.shape, one.dtype) == (other.shape, other.dtype)
    if type(one) is not type(other) or not is_wrapper(one):
        return False
    (parts, rest), (others, others_rest) = _inner(one), _inner(other)
    try:
        equal = bool(parts) and parts.keys() == others.keys() and bool(rest == others_rest)
    except Exception:  # noqa: BLE001 - comparing unknown objects may raise anything
        return False
    return equal and all(_have_one_form(parts[name], others[name]) for name in parts)


def copy_wrapper(key: str, target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy between tensors, at least one a wrapper; the target's class converts values."""
    target, source = unwrapped(target), unwrapped(source)
    try:
        with torch.no_grad():
            _copy(target, source)
    except Exception as error:
        kinds = [type(each).__qualname__ for each in (source, target)]
        raise UnsupportedValueError(
            f"{key!r} is stored as a {kinds[0]} and cannot be copied into a {kinds[1]} of shape "
            f"{tuple(target.shape)}: {type(error).__name__}: {error}; load into a tensor of the class, options and "
            "shards with which it was saved"
        ) from error


def plain_values(key: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a wrapper's values on the CPU."""
    if isinstance(tensor, ArchivedTensor):  # this process created the archive
        tensor = torch.load(io.BytesIO(tensor.archive), map_location="cpu", weights_only=False)
    if tensor.is_quantized:
        return tensor.dequantize()
    values = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    copy_wrapper(key, values, tensor)
    return values


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    if _have_one_form(target, source):  # the class's `copy_` may be missing or round
        for into, part in zip(_parts(target), _parts(source), strict=True):
            into.copy_(part)
        return
    values = source if is_wrapper(target) or not is_wrapper(source) else _values(target, source)
    if target.copy_(values) is not target:  # without `copy_`, the class copied into a temporary plain tensor
        raise TypeError(f"{type(target).__qualname__} has no `copy_`")


def _values(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    try:
        return torch.empty_like(target, device="cpu").copy_(source)
    except Exception:  # noqa: BLE001 - many classes copy only into their own class
        return source.dequantize()


_DTYPES = (torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4)
_OF_TENSOR = (torch.per_tensor_affine, torch.per_tensor_symmetric)
_OF_CHANNELS = (torch.per_channel_affine, torch.per_channel_symmetric)


def is_quantized_dtype(dtype: torch.dtype) -> bool:
    """Return whether a dtype is quantized."""
    return dtype in _DTYPES


def archive_quantized(key: str, tensor: torch.Tensor) -> io.BytesIO:
    """Return a quantized tensor's `torch.save` archive."""
    scheme = _scheme(tensor)
    if scheme is None:
        raise UnsupportedValueError(
            f"{key!r} has the dtype {tensor.dtype} and no quantizer, as after torch.empty: its integers have no "
            "meaning; save the result of a quantizing function, or its `int_repr()`"
        )
    tensor = tensor.detach().cpu()
    if scheme in _OF_TENSOR + _OF_CHANNELS:  # torch cannot clone or split others
        tensor = tensor.clone()
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return buffer


def check_divisible(key: str, tensor: torch.Tensor) -> None:
    """Raise UnsupportedValueError if torch cannot view boxes."""
    if not tensor.is_quantized:
        return
    scheme = _scheme(tensor)
    if scheme not in _OF_TENSOR + _OF_CHANNELS:
        what = "no quantizer" if scheme is None else f"the scheme {scheme}"
        raise UnsupportedValueError(
            f"{key!r} is saved or loaded in several parts, and its tensor of dtype {tensor.dtype} has {what}, which "
            "torch cannot divide; use tensors that are quantized per tensor or per channel as the stored parts are, "
            "also as the template, or dequantize before saving"
        )


def empty_like_part(key: str, part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Return an empty global tensor with the shard's quantizer."""
    if tuple(part.shape) == tuple(sizes):
        return part.detach()
    if not part.is_quantized:
        return part.new_empty(sizes)
    scheme = _scheme(part)
    # `new_empty` and similar functions drop the quantizer or fail.
    if scheme in _OF_TENSOR:
        return torch._empty_affine_quantized(  # noqa: SLF001
            tuple(sizes), scale=part.q_scale(), zero_point=part.q_zero_point(), dtype=part.dtype, device=part.device
        )
    if scheme in _OF_CHANNELS and part.size(part.q_per_channel_axis()) == sizes[part.q_per_channel_axis()]:
        return torch._empty_per_channel_affine_quantized(  # noqa: SLF001
            tuple(sizes),
            scales=part.q_per_channel_scales(),
            zero_points=part.q_per_channel_zero_points(),
            axis=part.q_per_channel_axis(),
            dtype=part.dtype,
            device=part.device,
        )
    raise UnsupportedValueError(
        f"{key!r} has no elements, and its quantizer ({scheme}) is sharded: no rank has all of it; replicate the "
        "tensor before saving, or leave it out"
    )


def copy_quantized(key: str, target: torch.Tensor, source: torch.Tensor, *, is_whole: bool) -> None:
    """Copy a stored quantized CPU tensor, with scale and zero point, into the template.

    If `is_whole`, the target's scale can be changed; without a quantizer, it then shares the memory of `source`.
    UnsupportedValueError: schemes or, in parts, scales differ.
    """
    with torch.no_grad():
        if not target.is_quantized:
            target.copy_(source.dequantize())
            return
        wanted, found = _parameters(source), _parameters(target)
        if is_whole and not found:
            target.data = source.to(target.device)
            return
        if wanted != found and not (is_whole and wanted["scheme"] == found["scheme"]):
            raise UnsupportedValueError(
                f"{key!r} is stored quantized with {wanted}, and the template's tensor with {found}; load into a whole "
                "tensor of the stored scheme, or into a floating-point one with allow_lossy_casts=True"
            )
        target.copy_(source)


def _parameters(tensor: torch.Tensor) -> dict[str, object]:
    scheme = _scheme(tensor)
    if scheme is None:
        return {}
    if scheme in _OF_TENSOR:
        return {"scheme": scheme, "scale": tensor.q_scale(), "zero point": tensor.q_zero_point()}
    scales, points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return {
        "scheme": scheme,
        "axis": tensor.q_per_channel_axis(),
        "scales": scales.tolist(),
        "zero points": points.tolist(),
    }


def _scheme(tensor: torch.Tensor) -> torch.qscheme | None:
    try:
        return tensor.qscheme()
    except RuntimeError:
        return None


_UNSIGNED = {torch.uint8: 8, torch.uint16: 16, torch.uint32: 32, torch.uint64: 64}
_SIGNED = {torch.int8: 8, torch.int16: 16, torch.int32: 32, torch.int64: 64}
# (exponent bits, significand bits with the hidden one)
_FLOATS = {
    torch.float64: (11, 53),
    torch.float32: (8, 24),
    torch.bfloat16: (8, 8),
    torch.float16: (5, 11),
    torch.float8_e5m2: (5, 3),
    torch.float8_e4m3fn: (4, 4),
}
_COMPLEX = {torch.complex128: torch.float64, torch.complex64: torch.float32, torch.complex32: torch.float16}


def is_lossless_cast(source: torch.dtype, target: torch.dtype) -> bool:
    """Return whether `target` can represent every number of `source`."""
    if source == target:
        return True
    if target in _COMPLEX:
        return is_lossless_cast(_COMPLEX.get(source, source), _COMPLEX[target])
    if source is torch.bool:
        return target in _UNSIGNED or target in _SIGNED or target in _FLOATS
    if target in _FLOATS:
        return _fits_float(source, *_FLOATS[target])
    if source in _UNSIGNED:
        return _UNSIGNED[source] <= _UNSIGNED.get(target, 0) or _UNSIGNED[source] < _SIGNED.get(target, 0)
    return source in _SIGNED and _SIGNED[source] <= _SIGNED.get(target, 0)


def _fits_float(source: torch.dtype, exponent_bits: int, significand_bits: int) -> bool:
    if source in _FLOATS:
        return _FLOATS[source][0] <= exponent_bits and _FLOATS[source][1] <= significand_bits
    magnitude_bits = _UNSIGNED.get(source) or (_SIGNED[source] - 1 if source in _SIGNED else None)
    # An integer of n magnitude bits also needs an exponent up to 2**n.
    return (
        magnitude_bits is not None
        and magnitude_bits <= significand_bits
        and magnitude_bits < 2 ** (exponent_bits - 1) - 1
    )
