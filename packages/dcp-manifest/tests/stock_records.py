"""Pickles of stock as torch writes them, made without torch: `Stock`, the records and functions that they name."""

from __future__ import annotations

import copyreg
import io
import pathlib
import pickle
import types
from typing import ClassVar


def stock_pickle(value, *, protocol=4, renamed=None):
    """A pickle of fake records under the names of stock's classes."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol, renamed or {}).dump(value)
    return buffer.getvalue()


METADATA = "torch.distributed.checkpoint.metadata"
FILESYSTEM = "torch.distributed.checkpoint.filesystem"


class _Pickler(pickle._Pickler):
    def __init__(self, file, protocol, renamed):
        super().__init__(file, protocol)
        self.renamed = renamed

    def save_global(self, obj, name=None):
        path = self.renamed.get(obj) or getattr(obj, "stock_path", None)
        if path is None:
            super().save_global(obj, name)
            return
        if self.proto >= 4:
            self.save(path[0])
            self.save(path[1])
            self.write(pickle.STACK_GLOBAL)
        else:
            self.write(pickle.GLOBAL + f"{path[0]}\n{path[1]}\n".encode())
        self.memoize(obj)

    dispatch: ClassVar = {**pickle._Pickler.dispatch, types.FunctionType: save_global}


class StockRecord:
    """Pickles as a stock class does: NEWOBJ, then BUILD with the state."""

    state = None

    def __init__(self, state=None, **attributes):
        self.state = state if state is not None else attributes

    def __reduce_ex__(self, protocol):
        return copyreg.__newobj__, (type(self),), self.state or None


def _record(name, module=METADATA):
    return type(name, (StockRecord,), {"stock_path": (module, name)})


class StockCall:
    """Pickles as a call of a function."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce_ex__(self, protocol):
        return self.function, self.arguments


def _function(module, name):
    def function(*arguments):
        raise AssertionError("never called")

    function.stock_path = (module, name)
    return function


class StockFilled:
    """Pickles as an instance of a class to which the pickle adds items."""

    def __init__(self, cls, items, pairs):
        self.cls, self.items, self.pairs = cls, items, pairs

    def __reduce_ex__(self, protocol):
        return self.cls, (), None, iter(self.items), iter(self.pairs.items())


class Stock:
    """What stock's pickles are made of."""

    Metadata = _record("Metadata")
    TensorStorageMetadata = _record("TensorStorageMetadata")
    TensorProperties = _record("TensorProperties")
    ChunkStorageMetadata = _record("ChunkStorageMetadata")
    BytesStorageMetadata = _record("BytesStorageMetadata")
    MetadataIndex = _record("MetadataIndex")
    StorageMeta = _record("StorageMeta")
    StorageInfo = _record("_StorageInfo", FILESYSTEM)
    size_class = staticmethod(_function("torch", "Size"))
    get_layout = staticmethod(_function("torch.serialization", "_get_layout"))
    memory_format = staticmethod(_function(METADATA, "_MEM_FORMAT_ENCODING"))
    float32 = staticmethod(_function("torch", "float32"))
    call = StockCall
    filled = StockFilled
    record = staticmethod(_record)
    pickle = staticmethod(stock_pickle)
    function = staticmethod(_function)

    @classmethod
    def size(cls, *numbers):
        return StockCall(cls.size_class, numbers)

    @classmethod
    def properties(cls, *more, memory_format=None):
        layout = StockCall(cls.get_layout, "torch.strided")
        memory_format = memory_format or StockCall(cls.memory_format, 0)
        return cls.TensorProperties((cls.float32, layout, True, memory_format, False, *more))

    @classmethod
    def metadata(cls, *, properties=None, path=True, **changes):
        """A checkpoint of one tensor in two chunks and one object."""
        chunks = [cls.ChunkStorageMetadata(offsets=cls.size(row, 0), sizes=cls.size(2, 3)) for row in (0, 2)]
        tensor = cls.TensorStorageMetadata(
            properties=properties or cls.properties(), size=cls.size(4, 3), chunks=chunks
        )
        storage = {
            cls.MetadataIndex(fqn="w", index=n, offset=cls.size(2 * n, 0)): cls.StorageInfo(
                relative_path=f"__{n}_0.distcp", offset=0, length=1500 + n
            )
            for n in (0, 1)
        }
        storage[cls.MetadataIndex(fqn="o", index=None)] = cls.StorageInfo(
            relative_path="__0_0.distcp", offset=1500, length=70_000, transform_descriptors=["stream.zstd/1"]
        )
        state = {
            "state_dict_metadata": {"w": tensor, "o": cls.BytesStorageMetadata()},
            "planner_data": {"w": ("w",), "o": ("x", 3)},
            "storage_data": storage,
            "storage_meta": cls.StorageMeta(
                checkpoint_id=pathlib.PurePosixPath("/a/b") if path else None, save_id="u", load_id=None, modules=[]
            ),
            "version": "1.0.0",
        }
        state.update(changes)
        return cls.Metadata({key: value for key, value in state.items() if value != "absent"})
