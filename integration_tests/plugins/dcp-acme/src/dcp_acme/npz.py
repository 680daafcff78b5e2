"""`NpzConverter`: archives of numpy (`.npz`) for `dcp convert`, piece by piece."""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from dcp_core import UnsupportedValueError
from dcp_core.errors import CorruptCheckpointError
from dcp_format import Content, TensorEntry, WriteOptions
from dcp_format.content.content import refuse_objects

__all__ = ["NpzConverter"]

_SUFFIX, _MEMBER = ".npz", ".npy"
_DTYPES = (
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
)


class NpzConverter:
    """The format `npz`; satisfies `dcp_format.Converter`."""

    def detect(self, path: str | os.PathLike[str]) -> bool:
        """Whether it is a zip file of arrays and nothing else."""
        try:
            with zipfile.ZipFile(path) as archive:
                names = archive.namelist()
        except (
            OSError,
            ValueError,
            zipfile.BadZipFile,
        ):  # ValueError: its names are not text
            return False
        return bool(names) and all(name.endswith(_MEMBER) for name in names)

    def suits(self, path: str | os.PathLike[str]) -> bool:
        """`.npz`."""
        return Path(path).suffix == _SUFFIX

    def read(self, path: str | os.PathLike[str]) -> Content:
        """All arrays; only their headers are read now."""
        with zipfile.ZipFile(path) as archive:
            members = [_Member(os.fspath(path), name) for name in archive.namelist()]
        return Content(
            os.fspath(path), {member.key: member.entry() for member in members}
        )

    def write(
        self, content: Content, path: str | os.PathLike[str], options: WriteOptions
    ) -> None:
        """Write an archive in one step. Raise an error if numpy cannot hold a value."""
        refuse_objects(content.objects, "an .npz archive")
        strange = [
            entry.name
            for entry in content.tensors.values()
            if entry.dtype not in _DTYPES
        ]
        if strange:
            raise UnsupportedValueError(
                f"numpy has no dtype for {strange[0]!r}, which is"
                f" {content.tensors[strange[0]].dtype}"
            )
        with (
            _appearing(Path(path), overwrite=options.overwrite) as file,
            zipfile.ZipFile(file, "w") as archive,
        ):
            for name in [*content.tensors, *content.aliases]:
                _write(
                    archive,
                    name,
                    content.tensors[content.aliases.get(name, name)],
                    options,
                )


class _Member:
    """One array of an archive; satisfies `dcp_io.PiecewiseData`."""

    def __init__(self, path: str, name: str) -> None:
        self.path, self.name, self.key = path, name, name.removesuffix(_MEMBER)
        with self._at_values() as (_, shape, dtype):
            self.shape, self.dtype = shape, dtype
        if str(self.dtype) not in _DTYPES:
            raise CorruptCheckpointError(
                f"an array of {self.dtype} is no tensor", key=self.key, file=path
            )

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return int(self.dtype.itemsize * np.prod(self.shape, dtype=np.int64))

    def pieces(self, max_bytes: int) -> Iterator[memoryview]:
        """The elements in row-major order."""
        with self._at_values() as (file, _, _):
            left = self.nbytes
            while left:
                piece = file.read(min(left, max(max_bytes, self.dtype.itemsize)))
                if not piece:
                    raise CorruptCheckpointError(
                        f"{left} bytes are missing", key=self.key, file=self.path
                    )
                left -= len(piece)
                yield memoryview(piece)

    def entry(self) -> TensorEntry:
        """The record that a conversion passes on."""
        return TensorEntry(self.key, str(self.dtype), self.shape, self)

    @contextlib.contextmanager
    def _at_values(self) -> Iterator[tuple[IO[bytes], tuple[int, ...], np.dtype[Any]]]:
        with zipfile.ZipFile(self.path) as archive, archive.open(self.name) as file:
            version = np.lib.format.read_magic(file)
            read = (
                np.lib.format.read_array_header_1_0
                if version == (1, 0)
                else np.lib.format.read_array_header_2_0
            )
            shape, fortran, dtype = read(file)
            if fortran or dtype.byteorder == ">":
                raise UnsupportedValueError(
                    f"{self.key!r} is column-major or big-endian; save it again"
                )
            yield file, shape, dtype


def _write(
    archive: zipfile.ZipFile, name: str, entry: TensorEntry, options: WriteOptions
) -> None:
    header = {
        "descr": np.dtype(entry.dtype).str,
        "fortran_order": False,
        "shape": entry.shape,
    }
    with archive.open(name + _MEMBER, "w", force_zip64=True) as file:
        np.lib.format.write_array_header_1_0(file, header)
        for piece in entry.data.pieces(options.max_inflight_bytes):
            file.write(piece)
            options.tick(len(piece))


@contextlib.contextmanager
def _appearing(path: Path, *, overwrite: bool) -> Iterator[IO[bytes]]:
    """A file that is at `path` when the block ends, and nowhere if it fails."""
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists; allow to overwrite it")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
