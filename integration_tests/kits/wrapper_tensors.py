"""Stand-ins for quantization libraries' tensors.

`BlockTensor` is like torchao's classes, `MethodTensor` like TransformerEngine's `Float8Tensor`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["WRAPPER_GLOBALS", "BlockOptions", "BlockTensor", "MethodDtype", "MethodTensor"]

_make: Any = torch.Tensor._make_wrapper_subclass
_aten = torch.ops.aten


@dataclass(frozen=True)
class BlockOptions:
    """Context of a `BlockTensor`."""

    block_size: int = 4


class _Wrapper(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def _same(self) -> Any:
        raise NotImplementedError

    def _fill(self, source: torch.Tensor) -> None:
        raise NotImplementedError

    def dequantize(self) -> torch.Tensor:
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        first = args[0]
        if func is _aten.detach.default or (func is _aten.view.default and tuple(args[1]) == tuple(first.shape)):
            return first._same()
        if func is _aten.is_pinned.default:  # stock calls this
            return False
        if func is _aten.copy_.default:
            if isinstance(first, _Wrapper):
                first._fill(args[1])
            else:
                first.copy_(args[1].dequantize())
            return first
        return cls._other(func, args)

    @classmethod
    def _other(cls, func: Any, args: tuple[Any, ...]) -> Any:
        raise NotImplementedError(f"{func} of {cls.__qualname__}")


class BlockTensor(_Wrapper):
    """int8 blocks of consecutive elements, with one scale per block; `offset` is added to the values."""

    codes: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None
    options: BlockOptions

    @staticmethod
    def __new__(
        cls, codes: torch.Tensor, scale: torch.Tensor, options: BlockOptions, offset: torch.Tensor | None = None
    ) -> BlockTensor:
        made: BlockTensor = _make(cls, codes.shape, dtype=torch.float32, device=codes.device)
        made.codes, made.scale, made.options, made.offset = codes, scale, options, offset
        return made

    @classmethod
    def of(cls, values: torch.Tensor, options: BlockOptions | None = None) -> BlockTensor:
        options = options or BlockOptions()
        blocks = values.float().reshape(-1, options.block_size)
        scale = blocks.abs().amax(1).clamp(min=1e-9) / 127
        return cls((blocks / scale[:, None]).round().to(torch.int8).view(values.shape), scale, options)

    def dequantize(self) -> torch.Tensor:
        blocks = self.codes.reshape(-1, self.options.block_size) * self.scale[:, None]
        return blocks.view(self.codes.shape) + (0 if self.offset is None else self.offset)

    def __tensor_flatten__(self) -> tuple[list[str], BlockOptions]:
        return ["codes", "scale", *(["offset"] if self.offset is not None else [])], self.options

    @classmethod
    def __tensor_unflatten__(
        cls, inner: Mapping[str, torch.Tensor], options: BlockOptions, size: Any = None, stride: Any = None
    ) -> BlockTensor:
        del size, stride
        return cls(inner["codes"], inner["scale"], options, inner.get("offset"))

    def _same(self) -> BlockTensor:
        return type(self)(self.codes, self.scale, self.options, self.offset)

    def _fill(self, source: torch.Tensor) -> None:
        if not isinstance(source, BlockTensor):
            source = self.of(source, self.options)
        if self.options != source.options:
            raise ValueError("the block sizes differ")
        self.codes.copy_(source.codes)
        self.scale.copy_(source.scale)
        if self.offset is not None and source.offset is not None:
            self.offset.copy_(source.offset)

    @classmethod
    def _other(cls, func: Any, args: tuple[Any, ...]) -> Any:
        if func is not _aten.slice.Tensor:
            return super()._other(func, args)
        each = args[0]
        given = [*args[1:], *(0, 0, 1 << 60)[len(args) - 1 :]]
        dim, start, end = given
        end = min(end, each.shape[dim])
        per_row = each.codes[0].numel() if each.dim() > 1 else 1
        first, last = start * per_row, end * per_row
        if dim or first % each.options.block_size or last % each.options.block_size:
            raise ValueError("a block cannot be divided")
        blocks = slice(first // each.options.block_size, last // each.options.block_size)
        return cls(each.codes[start:end], each.scale[blocks], each.options, each.offset)


class MethodDtype(enum.IntEnum):
    """Format of a `MethodTensor`'s elements."""

    E4M3 = 7


class MethodTensor(_Wrapper):
    """Tensor without `__tensor_flatten__` that pickles by a class method."""

    _data: torch.Tensor
    _scale_inv: torch.Tensor
    _kind: MethodDtype

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale_inv: torch.Tensor, kind: MethodDtype) -> MethodTensor:
        made: MethodTensor = _make(cls, data.shape, dtype=torch.bfloat16, device=data.device)
        made._data, made._scale_inv, made._kind = data, scale_inv, kind
        return made

    @classmethod
    def of(cls, values: torch.Tensor) -> MethodTensor:
        scale = (values.abs().amax().float().clamp(min=1e-9) / 448).reshape(1)
        return cls((values / scale).to(torch.float8_e4m3fn).view(torch.uint8), scale, MethodDtype.E4M3)

    def dequantize(self) -> torch.Tensor:
        return (self._data.view(torch.float8_e4m3fn).float() * self._scale_inv).to(torch.bfloat16)

    @classmethod
    def _make_in_reduce_ex(cls, data: torch.Tensor, scale_inv: torch.Tensor, kind: MethodDtype) -> MethodTensor:
        return cls(data, scale_inv, kind)

    def __reduce_ex__(self, protocol: Any) -> Any:
        del protocol
        return MethodTensor._make_in_reduce_ex, (self._data, self._scale_inv, self._kind)

    def _same(self) -> MethodTensor:
        return type(self)(self._data, self._scale_inv, self._kind)

    def _fill(self, source: torch.Tensor) -> None:
        source = source if isinstance(source, MethodTensor) else self.of(source)
        self._data.copy_(source._data)
        self._scale_inv.copy_(source._scale_inv)

    @classmethod
    def _other(cls, func: Any, args: tuple[Any, ...]) -> Any:
        if func is _aten._to_copy.default:
            return args[0]._same()
        return super()._other(func, args)


WRAPPER_GLOBALS: list[Any] = [BlockTensor, BlockOptions, MethodTensor, MethodDtype]
