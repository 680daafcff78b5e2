"""Reader of `torch.save` files as a `Content`: the pickle is read with an allow-list, tensors are read on demand.

Source: torch 2.13 `torch.serialization._load` (effect of `overall_storage`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import stat
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dcp_base.descriptors import open_descriptor
from dcp_base.schemes import file_path
from dcp_core.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsafeCheckpointError,
    UnsupportedFormatError,
    UnsupportedValueError,
)
from dcp_core.objects.allowed_globals import allowed_globals, how_to_allow
from dcp_core.objects.object_bytes import ObjectArchive, dump_object, read_archive
from dcp_core.state_dict.flatten import flatten, name_empty_mappings
from dcp_core.tensors.tensor_memory import TensorPieces
from dcp_format.checkpoints.stored_chunks import DecodingReader
from dcp_format.content.content import Content, TensorEntry
from dcp_format.safetensors.safetensors_index import read_weight_map
from dcp_io import LocalStore, PiecewiseData
from dcp_io.archives.archive_checks import ZipRecord, zip_records
from dcp_io.archives.zip_format import is_zip
from dcp_manifest import StoredChunk, StoredItem
from dcp_manifest.index.columns import Framing
from dcp_manifest.pickles.pickle_table import ForbiddenGlobalError

# Protocol 2 and the number that begins what torch.save wrote before it wrote zip archives.
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"
_NO_TENSORS = (bool, int, float, complex, str, bytes, type(None))


def is_torch_save(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins as `torch.save` files do: those of torch 1.5 too, which `open_torch_save` refuses."""
    head = _head(path)
    return is_zip(head[:4]) or head == _LEGACY


def _head(path: str | os.PathLike[str]) -> bytes:
    with contextlib.suppress(OSError):
        # Opening a pipe in another way would wait for a writer.
        descriptor = open_descriptor(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return os.pread(descriptor, len(_LEGACY), 0)
        finally:
            os.close(descriptor)
    return b""


def open_torch_save(path: str | os.PathLike[str], *, allow_globals: Sequence[Any] = ()) -> Content:
    """Open a `torch.save` file as a `Content`: nested mappings are flattened as by `save`, tied tensors become aliases.

    Raises:
        UnsafeCheckpointError: The file names a global that is not allowed.
        UnsupportedFormatError: The file has another byte order than this machine, or its records are compressed.
        UnsupportedValueError: The saved value is not a mapping.
    """
    path = file_path(path)
    state, records = map_torch_save(path, allow_globals=allow_globals)
    if not isinstance(state, Mapping):
        raise UnsupportedValueError(
            f"{path} holds a {type(state).__qualname__}, not a state dict: nothing names its values"
        )
    flat = flatten(state)
    place = Path(path)
    located = _Located(place, records)
    content = Content(str(place), {}, paths={**flat.paths, **name_empty_mappings(flat)}, close=located.close)
    seen: dict[Any, str] = {}
    for name, value in flat.values.items():
        if not _is_plain_tensor(value):
            if not isinstance(value, _NO_TENSORS):
                records.check_all()
            content.objects[name] = functools.partial(dump_object, value, key=name)
            continue
        tensor = value.detach()
        form = (
            *(tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride()),
            *(tensor.dtype, tensor.is_conj(), tensor.is_neg()),
        )
        if tensor.numel() and form in seen:
            content.aliases[name] = seen[form]
            continue
        seen[form] = name
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        content.tensors[name] = TensorEntry(name, dtype, shape, located.data(name, tensor), value.requires_grad)
    located.prepare()
    return content


def map_torch_save(path: str | os.PathLike[str], *, allow_globals: Sequence[Any] = ()) -> tuple[Any, _ArchiveRecords]:
    """Return the value in a `torch.save` file, and the file's records.

    Objects are checked; the caller must check the CRCs of tensors, which lie in a memory map, by the records.
    """
    place = file_path(path)
    try:
        size = os.stat(place).st_size
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"there is no file {place}: check the path") from error
    head = _head(place)
    if head == _LEGACY:
        raise UnsupportedFormatError(
            f"{place} was written by torch 1.5 or older, or with _use_new_zipfile_serialization=False: load it with "
            "torch.load(path, weights_only=True) and save it again with torch.save"
        )
    if not is_zip(head[:4]):
        raise CorruptCheckpointError("this is no torch.save archive", file=place)
    allowed = allowed_globals(allow_globals)

    try:
        mapped: Any = torch.UntypedStorage.from_file(place, False, size)
        records = _ArchiveRecords(mapped, file=place)
        records.check_small()

        def storage(archive: ObjectArchive, key: str, nbytes: int) -> torch.UntypedStorage:
            start = archive.stored(key, nbytes)
            found: torch.UntypedStorage = mapped[start : start + nbytes]
            return found

        _refuse_other_byte_order(records, place)
        return read_archive(records.view, allowed.table, storage), records
    except (CorruptCheckpointError, UnsupportedFormatError):
        raise
    except ForbiddenGlobalError as error:
        raise UnsafeCheckpointError(
            f"{place} names {error.path}, which is not allowed. {how_to_allow([error.path], with_planner=False)}"
        ) from None
    except Exception as error:
        raise CorruptCheckpointError(f"the file cannot be read: {error}", file=place) from error


def _refuse_other_byte_order(records: _ArchiveRecords, place: str) -> None:
    if ObjectArchive(records.view).swapped():
        raise UnsupportedFormatError(
            f"{place} was written with the other byte order; load it with torch.load and save it again"
        )


def _is_plain_tensor(value: object) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout is torch.strided
        and not value.is_quantized
        and not value.is_meta
    )


class _Located:
    def __init__(self, path: Path, records: _ArchiveRecords) -> None:
        self._store = LocalStore(path.parent)
        self._name = path.name
        self._records: _ArchiveRecords | None = records
        self._base = records.address
        self._bytes = records.nbytes
        self._reader = DecodingReader(self._store)
        self._chunks: list[StoredChunk] = []
        self._crcs = records.crcs

    def close(self) -> None:
        self._records = None

    def data(self, name: str, tensor: torch.Tensor) -> PiecewiseData:
        """Return the values: read from the file where they are contiguous, through the mapping otherwise."""
        start = tensor.data_ptr() - self._base
        inside = start >= 0 and start + tensor.nbytes <= self._bytes
        if tensor.numel() and not (inside and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())):
            self._check_storage(tensor)
            return TensorPieces(tensor)
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        size = tensor.nbytes
        crc32 = self._crcs.get((start, size))
        if crc32 is None:
            self._check_storage(tensor)
        start = start if size else 0
        item = StoredItem(self._name, start, size, 0, size, Framing.RAW, crc32)
        chunk = StoredChunk(name, dtype, (0,) * tensor.dim(), shape, item)
        self._chunks.append(chunk)
        return self._reader.tensor(dtype, shape, [chunk])

    def _check_storage(self, tensor: torch.Tensor) -> None:
        """Check the CRCs of a tensor's storage, if they will not be checked later."""
        storage = tensor.untyped_storage()
        if self._records is not None:
            self._records.check_range(storage.data_ptr() - self._base, storage.nbytes())

    def prepare(self) -> None:
        self._reader.prepare(self._chunks)


# Within the archive's folder; the values of each storage are one record.
_VALUES = "/data/"


class _ArchiveRecords:
    """Records of an archive, and which of them have been checked against their CRC."""

    def __init__(self, mapped: torch.UntypedStorage, *, file: str) -> None:
        empty = torch.tensor([], dtype=torch.uint8, device="cpu")
        self.view = memoryview(empty.set_(mapped).numpy())  # type: ignore[arg-type]
        self._file = file
        self.address = mapped.data_ptr()
        self.nbytes = mapped.nbytes()
        try:
            records = zip_records(self.view)
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"the file cannot be read: {error}", file=file) from error
        # Before their sizes are looked at: a record that compresses well is longer than the file without any damage.
        if any(record.deflated and _VALUES in record.name for record in records):
            raise UnsupportedFormatError(f"{file} was compressed by an archiver; torch.load and torch.save it again")
        if sum(record.bytes for record in records) > self.nbytes:
            raise CorruptCheckpointError("its records claim more bytes than the file has", file=file)
        # A writer may leave CRCs out: nothing can be checked then.
        known = any(record.crc32 for record in records if record.bytes)
        self._unchecked = [record for record in records if record.bytes] if known else []
        self.crcs = {
            (record.start, record.stored_bytes): record.crc32 for record in self._unchecked if not record.deflated
        }
        """(Start, length) of each uncompressed record → its CRC."""

    def check_small(self) -> None:
        self._check(record for record in self._unchecked if _VALUES not in record.name)

    def check_range(self, start: int, nbytes: int) -> None:
        stop = start + nbytes
        self._check(
            record for record in self._unchecked if record.start < stop and start < record.start + record.stored_bytes
        )

    def check_all(self) -> None:
        self._check(self._unchecked)

    def _check(self, records: Iterable[ZipRecord]) -> None:
        for record in [*records]:
            try:
                value = record.find_crc32(self.view)
            except zlib.error:
                value = None
            if value != record.crc32:
                raise CorruptCheckpointError(
                    f"the record {record.name!r} does not match its CRC: the file is damaged; restore it from a copy",
                    file=self._file,
                    offset=record.start,
                )
            self._unchecked.remove(record)


_INDEX_SUFFIX = ".bin.index.json"
# Other files of such folders hold arguments, optimizers or tokenizers.
_WEIGHTS = re.compile(r"((diffusion_)?pytorch_model|adapter_model)(\.\w+)?\.bin")
_USUAL = ("pytorch_model", "diffusion_pytorch_model", "adapter_model")


def is_torch_weights(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a `torch.save` file, an index of such files, or a folder with such files."""
    place = Path(path)
    if place.is_dir():
        return bool(_sets(place))
    return place.name.endswith(_INDEX_SUFFIX) or is_torch_save(path)


def open_torch_weights(path: str | os.PathLike[str]) -> Content:
    """Open a `torch.save` file, or all files of an index or folder, as one `Content`.

    Of several sets in a folder, the set without a variant is read: `pytorch_model.bin`, not `pytorch_model.fp16.bin`.
    Raises UnsupportedFormatError if each is a variant.
    """
    place = Path(file_path(path))
    if place.is_dir():
        name = _chosen(place)
        if not name.endswith(_INDEX_SUFFIX):
            return _open_inside(place, name)
        place = place / name
    if not place.name.endswith(_INDEX_SUFFIX):
        return open_torch_save(place)
    folder = place.parent
    wanted = read_weight_map(folder, place.name)
    if wanted is None:
        raise CheckpointNotFoundError(f"there is no index {place}: check the path")
    made = Content(str(place), {}, paths={})
    with contextlib.ExitStack() as opened:
        for name in sorted(set(wanted.values())):
            if not (folder / name).exists():
                raise CheckpointNotFoundError(
                    f"{folder / name} is missing, and {place.name} names it: restore or download it"
                )
            part = _open_inside(folder, name)
            opened.callback(part.close)
            twice = [*part.tensors, *part.objects, *part.aliases]
            if clash := [key for key in twice if key in made.tensors or key in made.objects or key in made.aliases]:
                raise CorruptCheckpointError("two files hold a value of this name", key=clash[0], file=name)
            made.tensors |= part.tensors
            made.objects |= part.objects
            made.aliases |= part.aliases
            made.paths = {**(made.paths or {}), **(part.paths or {})}
        held = made.tensors.keys() | made.objects.keys() | made.aliases.keys()
        if lost := sorted(wanted.keys() - held):
            raise CorruptCheckpointError(
                "the file that the index names does not hold it", key=lost[0], file=wanted[lost[0]]
            )
        made.close = opened.pop_all().close
    return made


def _sets(folder: Path) -> list[str]:
    """Return the indexes and single files of weights in a folder, without files of an index."""
    names = sorted(path.name for path in folder.glob("*.bin*"))
    return [name for name in names if name.endswith(_INDEX_SUFFIX) or _WEIGHTS.fullmatch(name)]


def _open_inside(folder: Path, name: str) -> Content:
    LocalStore(folder).size(name)  # refuses links that lead out of the folder
    return open_torch_save(folder / name)


def _chosen(folder: Path) -> str:
    found = _sets(folder)
    usual = [f"{name}{suffix}" for name in _USUAL for suffix in (_INDEX_SUFFIX, ".bin")]
    for name in usual:
        if name in found:
            break
    else:
        if len(found) != 1:
            raise UnsupportedFormatError(
                f"{folder} holds several sets of weights ({', '.join(found)}): name the one to read"
            )
        name = found[0]
    return name
