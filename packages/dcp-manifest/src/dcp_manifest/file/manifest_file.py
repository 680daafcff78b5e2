"""Reader of a manifest by byte ranges: one tensor costs only the blocks it needs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TypeVar

import numpy as np

from dcp_manifest.errors import CorruptCheckpointError
from dcp_manifest.file.blob import FOOTER_BYTES, LazyBlob, ReadRange, read_exactly, read_footer
from dcp_manifest.file.manifest_read import ManifestReader
from dcp_manifest.index.columns import CheckpointIndex, ManifestInfo, distinct
from dcp_manifest.index.schema import COLUMNS, check_column, check_index, check_relative_path

__all__ = ["ManifestFile"]

T = TypeVar("T")


class ManifestFile:
    """Reader of a manifest in a file of `size` bytes, by byte ranges on demand. Not thread-safe.

    All bytes that are read are verified by the CRCs of their 64 KiB blocks; damage elsewhere goes unnoticed. `read`
    maps (offset, length) to bytes; messages name `file`.

    Raises:
        CorruptCheckpointError: Footer or header are damaged, or the manifest is missing, as in stock's files: use
            `read_index`.
        UnsupportedFormatError: A newer major version wrote the file.

    Example:
        ```python
        from pathlib import Path
        from dcp_core import save
        from dcp_manifest import ManifestFile

        save({"step": 1}, checkpoint_id="step-1")
        data = Path("step-1/.metadata").read_bytes()
        manifest = ManifestFile(lambda offset, length: data[offset : offset + length], len(data), file=".metadata")
        assert manifest.names() == ["step"]
        ```
    """

    def __init__(self, read: ReadRange, size: int, *, file: str) -> None:
        self.file = file
        length = min(size, FOOTER_BYTES)
        footer = read_footer(read_exactly(read, size - length, length, file=file), size=size, file=file)
        if footer is None:
            raise CorruptCheckpointError("there is no manifest at the end of the file", file=file)
        blob = LazyBlob(read, footer, file=file)
        self._reader = self._sound(lambda: ManifestReader(blob))
        self.info: ManifestInfo = self._sound(self._reader.info)

    def names(self) -> list[str]:
        """See `CheckpointIndex.names`."""
        objects = self._sound(lambda: self._reader.column("object.name"))
        return list(dict.fromkeys((*self._tensors.tensor_names, *objects, *self._aliases)))

    def tensor(self, name: str, *, owner: int = 0) -> CheckpointIndex:
        """Return an index that contains one tensor: its row, its chunks and their items, all checked.

        The index has the complete tables of dtypes, files and chains, but no paths. If `name` is an alias, the index
        includes it. `owner` is 0 for a tensor of the whole job, r + 1 for a tensor that only rank r saved.

        Raises:
            KeyError: The manifest lacks such a tensor.
            CorruptCheckpointError: The bytes that were read are damaged or inconsistent.
        """
        rows = self._rows.get(owner, {})
        alias = name not in rows and owner == 0
        row = self._aliases[name] if alias else rows[name]
        tables = self._tables
        index = CheckpointIndex(dtypes=tables.dtypes, files=tables.files, chains=tables.chains, info=self.info)

        def fill() -> CheckpointIndex:
            self._reader.put_chunks(index, self._tensors, row, row + 1)
            if alias:
                index.alias_names, index.alias_targets = [name], np.zeros(1, np.uint32)
            check_index(index)
            return index

        return self._sound(fill)

    @cached_property
    def _tables(self) -> CheckpointIndex:
        tables = self._sound(self._reader.tables)
        for path in tables.files:
            check_relative_path(path, file=self.file)
        return tables

    @cached_property
    def _tensors(self) -> CheckpointIndex:
        return self._sound(self._reader.tensors)

    @cached_property
    def _rows(self) -> dict[int, dict[str, int]]:
        tensors = self._tensors
        rows = {}
        for owner in distinct(tensors.tensor_owner).tolist():
            own = np.flatnonzero(tensors.tensor_owner == owner).tolist()
            rows[owner] = dict(zip([tensors.tensor_names[row] for row in own], own, strict=True))
        return rows

    @cached_property
    def _aliases(self) -> dict[str, int]:
        def read() -> dict[str, int]:
            names, targets = self._reader.column("alias.name"), self._reader.column("alias.target")
            check_column(COLUMNS["alias.target"], targets, {"tensor": len(self._tensors.tensor_names)})
            return dict(zip(names, targets.tolist(), strict=True))

        return self._sound(read)

    def _sound(self, read: Callable[[], T]) -> T:
        try:
            return read()
        except CorruptCheckpointError:
            raise
        except (ValueError, TypeError, IndexError) as error:
            raise CorruptCheckpointError(f"the manifest is inconsistent: {error}", file=self.file) from error
