"""Rules for torch tensors and classes in pickles of stored objects.

torch's own functions trust sizes, strides, offsets and indices; these rules check them against the archive's storages.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.torch_version import TorchVersion

from dcp_core.objects.python_calls import refused
from dcp_manifest.pickles.pickle_table import Budget, Call, Function, UnsafePickleError

_MAX_ELEMENTS = 1 << 62
_MAX_DIMS = 64
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_STORAGES = (torch.storage.TypedStorage, torch.UntypedStorage)
_METADATA = {"conj", "neg"}
# Dtypes with several elements per byte.
_PER_BYTE = {torch.quint4x2: 2, torch.quint2x4: 4}


def _refuse(what: str) -> UnsafePickleError:
    return UnsafePickleError(f"a tensor with {what} is not allowed")


def _extents(values: Any) -> tuple[int, ...]:
    right = type(values) in (tuple, list, torch.Size) and len(values) <= _MAX_DIMS
    if not right or any(type(value) is not int or not 0 <= value < _MAX_ELEMENTS for value in values):
        raise _refuse("such sizes or strides")
    return tuple(values)


def _check_bounds(budget: Budget, size: Any, stride: Any, offset: Any, elements: int) -> tuple[Any, Any]:
    sizes, strides = _extents(size), _extents(stride)
    budget.spend(len(sizes))
    if len(sizes) != len(strides) or type(offset) is not int or not 0 <= offset <= elements:
        raise _refuse("such strides, or such an offset")
    if math.prod(extent or 1 for extent in sizes) >= _MAX_ELEMENTS:
        raise _refuse("so many elements")
    last = sum((extent - 1) * step for extent, step in zip(sizes, strides, strict=True))
    if 0 not in sizes and offset + last >= elements:
        raise _refuse("elements beyond its storage")
    return sizes, strides


def _check_hooks(hooks: Any) -> None:
    if hooks:
        raise _refuse("backward hooks")


def _plain(value: Any, *types: type) -> torch.Tensor:
    if type(value) not in (types or _PLAIN) or value.layout is not torch.strided or value.device.type != "cpu":
        raise _refuse("parts that are not plain tensors")
    if value.is_quantized or value.is_nested:
        raise _refuse("parts that are not plain tensors")
    return value  # type: ignore[no-any-return]


def _over(
    budget: Budget, storage: Any, dtype: Any, offset: Any, size: Any, stride: Any, requires_grad: Any
) -> torch.Tensor:
    untyped = getattr(storage, "_untyped_storage", storage)
    if type(storage) not in _STORAGES or type(dtype) is not torch.dtype:
        raise _refuse("no storage or dtype")
    sizes, strides = _check_bounds(budget, size, stride, offset, untyped.nbytes() // dtype.itemsize)
    tensor = torch.empty((0,), dtype=dtype, device="cpu").set_(untyped, offset, sizes, strides)
    if requires_grad:
        tensor.requires_grad = True
    return tensor


def _with_metadata(tensor: torch.Tensor, metadata: Any) -> torch.Tensor:
    if not metadata:
        return tensor
    if type(metadata) is not dict or not set(metadata) <= _METADATA or tensor.dtype is torch.bool:
        raise _refuse("such metadata")
    if any(type(value) is not bool for value in metadata.values()) or (
        metadata.get("conj") and not tensor.dtype.is_complex
    ):
        raise _refuse("such metadata")
    torch._utils.set_tensor_metadata(tensor, metadata)  # type: ignore[no-untyped-call] # noqa: SLF001
    return tensor


def _rebuild_v1(budget: Budget, arguments: tuple[Any, ...]) -> torch.Tensor:
    storage, offset, size, stride = arguments
    return _over(budget, storage, _dtype_of(storage), offset, size, stride, requires_grad=False)


def _dtype_of(storage: Any) -> Any:
    return getattr(storage, "dtype", torch.uint8)


def _rebuild_v2(budget: Budget, arguments: tuple[Any, ...]) -> torch.Tensor:
    storage, offset, size, stride, requires_grad, hooks, *metadata = arguments
    typed = (storage, offset, size, stride, requires_grad, hooks, _dtype_of(storage), *metadata)
    return _rebuild_v3(budget, typed)


def _rebuild_v3(budget: Budget, arguments: tuple[Any, ...]) -> torch.Tensor:
    storage, offset, size, stride, requires_grad, hooks, dtype, *metadata = arguments
    _check_hooks(hooks)
    tensor = _over(budget, storage, dtype, offset, size, stride, requires_grad)
    return _with_metadata(tensor, *metadata) if metadata else tensor


def _per_channel(budget: Budget, scales: Any, zero_points: Any, *, exact: bool) -> tuple[torch.Tensor, torch.Tensor]:
    made = []
    dtypes = (torch.double, torch.long) if exact else (torch.float, torch.float)
    for values, dtype in zip((scales, zero_points), dtypes, strict=True):
        if type(values) is list and all(type(value) in (int, float) for value in values):
            budget.spend(len(values))
            values = torch.tensor(values, dtype=dtype, device="cpu")
        made.append(_plain(values))
        budget.spend(made[-1].numel())
    return made[0].clone(), made[1].clone()


def _rebuild_quantized(budget: Budget, arguments: tuple[Any, ...]) -> torch.Tensor:
    storage, offset, size, stride, parameters, requires_grad, hooks = arguments
    _check_hooks(hooks)
    if type(storage) is not torch.storage.TypedStorage or requires_grad:
        raise _refuse("no storage, or with a gradient")
    untyped, dtype = storage._untyped_storage, storage.dtype  # noqa: SLF001
    elements = untyped.nbytes() // dtype.itemsize * _PER_BYTE.get(dtype, 1)
    sizes, strides = _check_bounds(budget, size, stride, offset, elements)
    tensor = _empty_quantized(budget, dtype, sizes, parameters)
    return tensor.set_(untyped, offset, sizes, strides)


def _empty_quantized(budget: Budget, dtype: torch.dtype, sizes: tuple[int, ...], parameters: Any) -> torch.Tensor:
    scheme = parameters[0]
    if scheme == torch.per_tensor_affine:
        _, scale, zero_point = parameters
        if type(scale) is not float or type(zero_point) is not int:
            raise _refuse("such a scale or zero point")
        return torch._empty_affine_quantized((0,), scale=scale, zero_point=zero_point, dtype=dtype, device="cpu")  # noqa: SLF001
    if scheme not in (torch.per_channel_affine, torch.per_channel_affine_float_qparams):
        raise _refuse("such a quantization scheme")
    _, scales, zero_points, axis = parameters
    scales, zero_points = _per_channel(budget, scales, zero_points, exact=scheme == torch.per_channel_affine)
    if type(axis) is not int or not 0 <= axis < len(sizes):
        raise _refuse("such an axis")
    if not tuple(scales.shape) == tuple(zero_points.shape) == (sizes[axis],):
        raise _refuse("such scales")
    empty = [extent if dim == axis else 0 for dim, extent in enumerate(sizes)]
    make: Callable[..., torch.Tensor] = torch._empty_per_channel_affine_quantized  # noqa: SLF001
    return make(empty, scales=scales, zero_points=zero_points, axis=axis, dtype=dtype, device="cpu")


def _rebuild_sparse(budget: Budget, arguments: tuple[Any, ...]) -> torch.Tensor:
    """Check the indices: torch would follow bad ones out of the memory."""
    layout, (*indices, values, size), coalesced = _sparse_parts(arguments)
    sizes = _extents(size)
    if math.prod(extent or 1 for extent in sizes) >= _MAX_ELEMENTS:
        raise _refuse("so many elements")
    budget.spend(_plain(values).numel() + sum(_plain(part).numel() for part in indices))
    # Copy, so that no other object can change checked indices.
    indices = [part.detach().clone() for part in indices]
    if layout is torch.sparse_coo:
        make: Callable[..., torch.Tensor] = torch.sparse_coo_tensor
        return make(*indices, values, sizes, check_invariants=True, is_coalesced=coalesced, device="cpu")
    compressed: Callable[..., torch.Tensor] = torch.sparse_compressed_tensor
    return compressed(*indices, values, sizes, layout=layout, check_invariants=True, device="cpu")


def _sparse_parts(arguments: tuple[Any, ...]) -> tuple[torch.layout, tuple[Any, ...], bool | None]:
    layout, data = arguments
    coalesced = None
    if layout is torch.sparse_coo and len(data) == 4:
        *data, coalesced = data
    compressed = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
    count = 3 if layout is torch.sparse_coo else 4 if layout in compressed else -1
    if len(data) != count or type(coalesced) not in (bool, type(None)):
        raise _refuse("such a sparse layout")
    return layout, tuple(data), coalesced


def _rebuild_nested(budget: Budget, arguments: tuple[Any, ...]) -> torch.Tensor:
    buffer, *shapes = (_plain(part) for part in arguments)
    budget.spend(sum(part.numel() for part in shapes))
    sizes, strides, offsets = (part.detach().clone() for part in shapes)
    right = all(part.dtype is torch.int64 for part in shapes) and buffer.dim() == offsets.dim() == 1
    if not right or sizes.shape != strides.shape or sizes.dim() != 2 or len(sizes) != len(offsets):
        raise _refuse("such nested sizes")
    for size, stride, offset in zip(sizes.tolist(), strides.tolist(), offsets.tolist(), strict=True):
        _check_bounds(budget, size, stride, offset, buffer.numel())
    return torch._nested_view_from_buffer(buffer.contiguous(), sizes, strides, offsets)  # noqa: SLF001


def _moved(budget: Budget, tensor: torch.Tensor, dtype: Any, requires_grad: Any) -> torch.Tensor:
    if type(dtype) is not torch.dtype:
        raise _refuse("no dtype")
    budget.spend(tensor.numel())
    moved = tensor.detach().to(dtype)
    return moved.requires_grad_() if requires_grad else moved


def _rebuild_from_cpu(budget: Budget, arguments: tuple[Any, ...]) -> torch.Tensor:
    tensor, dtype, _, requires_grad = arguments
    return _moved(budget, _plain(tensor), dtype, requires_grad)


def _rebuild_from_numpy(budget: Budget, arguments: tuple[Any, ...]) -> torch.Tensor:
    array, dtype, _, requires_grad = arguments
    if type(array) is not np.ndarray or array.dtype.kind not in "biufc":
        raise _refuse("no array of numbers")
    budget.spend(array.size)
    return _moved(budget, torch.from_numpy(array.copy()), dtype, requires_grad)


def _rebuild_meta(budget: Budget, arguments: tuple[Any, ...]) -> torch.Tensor:
    dtype, size, stride, requires_grad = arguments
    if type(dtype) is not torch.dtype or type(requires_grad) is not bool:
        raise _refuse("no dtype")
    sizes, strides = _check_bounds(budget, size, stride, 0, _MAX_ELEMENTS)
    return torch.empty_strided(sizes, strides, dtype=dtype, device="meta", requires_grad=requires_grad)


def _parameter(_: Budget, arguments: tuple[Any, ...]) -> torch.nn.Parameter:
    data, requires_grad, *more = arguments
    if not isinstance(data, torch.Tensor) or type(requires_grad) is not bool or len(more) > 1:
        raise _refuse("no data, as a parameter,")
    _check_hooks(*more) if more else None
    return torch.nn.Parameter(data, requires_grad)


def _parameter_with_state(budget: Budget, arguments: tuple[Any, ...]) -> torch.nn.Parameter:
    *plain, state = arguments
    made: torch.nn.Parameter = _with_attributes(budget, _parameter(budget, tuple(plain)), state)
    return made


def _with_attributes(budget: Budget, tensor: Any, state: Any) -> Any:
    """Set a tensor's attributes; refuse ones that hide its class's."""
    if type(state) is tuple and len(state) == 2 and not state[1]:
        state = state[0]
    if not state:
        return tensor
    if type(state) is not dict or any(type(name) is not str or hasattr(torch.Tensor, name) for name in state):
        raise _refuse("such attributes")
    budget.spend(len(state))
    vars(tensor).update(state)
    return tensor


def _wrapper(budget: Budget, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    cls, dtype, size, stride, offset, layout, _, requires_grad = arguments
    if type(dtype) is not torch.dtype or type(layout) is not torch.layout or type(requires_grad) is not bool:
        raise _refuse("no dtype or layout")
    sizes, strides = _check_bounds(budget, size, stride, offset, _MAX_ELEMENTS)
    return cls, dtype, sizes, strides, offset, layout, "cpu", requires_grad


def _size(_: Budget, arguments: tuple[Any, ...]) -> torch.Size:
    if len(arguments) != 1:
        raise refused(torch.Size, arguments)
    return torch.Size(_extents(arguments[0]))


def _device(_: Budget, arguments: tuple[Any, ...]) -> torch.device:
    kinds = [type(argument) for argument in arguments]
    if kinds not in ([str], [str, int]) or len(arguments[0]) > 40:
        raise refused(torch.device, arguments)
    return torch.device(*arguments)


def _layout(_: Budget, arguments: tuple[Any, ...]) -> Any:
    if [type(argument) for argument in arguments] != [str]:
        raise refused(torch.layout, arguments)
    return torch.serialization._get_layout(arguments[0])  # type: ignore[no-untyped-call] # noqa: SLF001


def _version(_: Budget, arguments: tuple[Any, ...]) -> TorchVersion:
    if [type(argument) for argument in arguments] != [str] or len(arguments[0]) > 100:
        raise refused(TorchVersion, arguments)
    return TorchVersion(arguments[0])


_FUNCTIONS: dict[str, Call] = {
    "_rebuild_tensor": _rebuild_v1,
    "_rebuild_tensor_v2": _rebuild_v2,
    "_rebuild_tensor_v3": _rebuild_v3,
    "_rebuild_qtensor": _rebuild_quantized,
    "_rebuild_sparse_tensor": _rebuild_sparse,
    "_rebuild_nested_tensor": _rebuild_nested,
    "_rebuild_device_tensor_from_cpu_tensor": _rebuild_from_cpu,
    "_rebuild_device_tensor_from_numpy": _rebuild_from_numpy,
    "_rebuild_meta_tensor_no_storage": _rebuild_meta,
    "_rebuild_parameter": _parameter,
    "_rebuild_parameter_with_state": _parameter_with_state,
}
TENSOR_CALLS: list[tuple[Any, Call]] = [
    (torch.Size, _size),
    (torch.device, _device),
    (torch.nn.Parameter, _parameter),
    (TorchVersion, _version),
]
Subclassed = Callable[[Callable[..., Any], tuple[Any, ...], Any], Any]


def tensor_functions(
    subclassed: Subclassed, around: Callable[[str, Call], Call] = lambda _, call: call
) -> dict[str, Function]:
    """Return full name → torch function for rebuilding tensors, with its rule.

    `subclassed` rebuilds or refuses a tensor of a class outside torch. `around` may replace rules.
    """

    def wrapper(budget: Budget, arguments: tuple[Any, ...]) -> Any:
        checked = _wrapper(budget, arguments)
        return subclassed(torch._utils._rebuild_wrapper_subclass, checked, checked[0])  # noqa: SLF001

    def from_type(budget: Budget, arguments: tuple[Any, ...]) -> Any:
        function, cls, inner, state = arguments
        if type(inner) is not tuple or not any(function is known for known in rebuilding):
            raise UnsafePickleError("a call of _rebuild_from_type_v2 with another function is not allowed")
        made = function.call(budget, inner)
        if not isinstance(made, torch.Tensor):  # an examination creates no tensor
            return made
        if any(cls is plain for plain in _PLAIN):
            return _with_attributes(budget, made if type(made) is cls else made.as_subclass(cls), state)
        rebuild: Callable[..., Any] = torch._tensor._rebuild_from_type_v2  # noqa: SLF001
        return subclassed(rebuild, (lambda: made, cls, (), state), cls)

    functions: dict[str, Function] = {}
    for name, call in {**_FUNCTIONS, "_rebuild_wrapper_subclass": wrapper}.items():
        functions[f"torch._utils.{name}"] = Function(f"torch._utils.{name}", around(name, call))
    rebuilding = list(functions.values())
    functions["torch.serialization._get_layout"] = Function("torch.serialization._get_layout", _layout)
    # torch 1.6 and older use another module name.
    for module in ("_tensor", "tensor"):
        functions[f"torch.{module}._rebuild_from_type_v2"] = Function("torch._tensor._rebuild_from_type_v2", from_type)
    return functions
