"""`Content` of a checkpoint or file during a conversion; converters read it from a format and write it to one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from dcp_core.errors import UnsupportedValueError
from dcp_io import Layout, PiecewiseData
from dcp_manifest.index.columns import PathElement

Path = tuple[PathElement, ...]
_REMEDY = (
    "write such values to a file next to it (objects='sidecar', `--objects sidecar`), leave them out (objects='skip', "
    "`--objects skip`), or name what to convert (include=['model.*'], `--include 'model.*'`)"
)
_SHOWN = 8

MAX_FILE_BYTES = 5_000_000_000
"""Default size at which tensors are split over several files, in every format that does it."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor during a conversion: its row-major little-endian bytes are read on demand.

    `dtype` is the name of torch's dtype without `torch.`; `shape` is in elements.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: PiecewiseData
    requires_grad: bool = False


@dataclass(slots=True)
class Content:
    """Tensors and objects of a checkpoint or file, read on demand; `close` closes the source.

    Args:
        url: Path or URI of the source, for error messages.
        tensors: Tensors by name, in the order of the source.
        objects: Name → function that returns the object as `torch.save` bytes.
        aliases: Additional name of a tied tensor → the tensor's name in `tensors`.
        paths: Name → path of keys and indices in the nested state dict; None for a flat state dict.
        close: Function that closes open files.
    """

    url: str
    tensors: dict[str, TensorEntry]
    objects: dict[str, Callable[[], bytes]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    paths: dict[str, Path] | None = None
    close: Callable[[], None] = lambda: None

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes; tied tensors count once."""
        return sum(entry.data.nbytes for entry in self.tensors.values())


def ticking(content: Content, tick: Callable[[int], None]) -> Content:
    """Return the content with progress reports: `tick` is called with the bytes of each used piece."""
    tensors = {name: replace(entry, data=_Ticking(entry.data, tick)) for name, entry in content.tensors.items()}
    return replace(content, tensors=tensors)


class _Ticking:
    def __init__(self, data: PiecewiseData, tick: Callable[[int], None]) -> None:
        self._data = data
        self._tick = tick
        self.nbytes = data.nbytes

    def pieces(self, max_bytes: int) -> Iterator[memoryview]:
        for piece in self._data.pieces(max_bytes):
            yield piece
            self._tick(len(piece))


def refuse_objects(names: Iterable[str], where: str, *, remedy: str = _REMEDY) -> None:
    """Raise UnsupportedValueError if there are objects, for a format that holds only tensors."""
    found = sorted(names)
    if found:
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        verb = "are not tensors" if len(found) > 1 else "is not a tensor"
        raise UnsupportedValueError(
            f"{where} holds tensors only; {', '.join(map(repr, found[:_SHOWN]))}{more} {verb}: {remedy}"
        )


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Options for writing a file or checkpoint; each format uses the options that apply to it.

    Args:
        max_inflight_bytes: Limit of the memory for pieces of tensors.
        overwrite: Whether an existing destination may be replaced.
        max_file_bytes: Maximum size of one file, for formats with several files; a larger tensor gets its own file.
        objects: Treatment of objects by formats that hold tensors only: `refuse` (raise an error), `sidecar` (write
            them to a file next to the tensors) or `skip`.
        layout: Layout of a checkpoint's data files.
        compression: Compression of a checkpoint's data, as for `FileSystemWriter`: `auto`, `planes`, `zstd`, ….
        tick: Called with the number of bytes just converted.

    Example:
        ```python
        import torch
        from dcp_format import WriteOptions, convert

        torch.save({"weight": torch.ones(1000)}, "model.pt")
        convert("model.pt", "step-0", options=WriteOptions(layout="raw", compression="auto"))
        ```
    """

    max_inflight_bytes: int = 16 << 20
    overwrite: bool = False
    max_file_bytes: int = MAX_FILE_BYTES
    objects: str = "refuse"
    layout: Layout = "torch"
    compression: Any = None
    tick: Callable[[int], None] = field(default=lambda _: None)
