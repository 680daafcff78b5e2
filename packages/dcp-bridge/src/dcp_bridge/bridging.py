"""`from_stock` and `to_stock`: choose an object's adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, overload

from torch.distributed.checkpoint import metadata, planner, storage

from dcp_bridge.load_planners import LoadPlannerForStock, StockLoadPlanner
from dcp_bridge.readers import ReaderForStock, StockReader
from dcp_bridge.save_planners import SavePlannerForStock, StockSavePlanner
from dcp_bridge.stock_records import stock_metadata
from dcp_bridge.stock_writer import StockStagingWriter, StockWriter, is_stager
from dcp_bridge.wrapper import Wrapper
from dcp_bridge.writer_for_stock import WriterForStock
from dcp_core import LoadPlanner, Metadata, SavePlanner, StorageReader, StorageWriter
from dcp_core.records.foreign_records import as_metadata

_OURS = (StorageWriter, StorageReader, SavePlanner, LoadPlanner, Metadata)
_STOCKS = (storage.StorageWriter, storage.StorageReader, planner.SavePlanner, planner.LoadPlanner, metadata.Metadata)


@overload
def from_stock(value: storage.StorageWriter, *, check_results: bool = ...) -> StorageWriter: ...
@overload
def from_stock(value: storage.StorageReader) -> StorageReader: ...
@overload
def from_stock(value: planner.SavePlanner) -> SavePlanner: ...
@overload
def from_stock(value: planner.LoadPlanner, *, trust_objects: bool = ...) -> LoadPlanner: ...
@overload
def from_stock(value: metadata.Metadata) -> Metadata: ...
def from_stock(value: Any, **options: Any) -> Any:
    """Adapt a storage, planner or `Metadata` of `torch.distributed.checkpoint` for our `save` and `load`.

    Args:
        value: Stock's object. A `to_stock` adapter is unwrapped; our objects are returned unchanged.
        options: `check_results` for a writer (see `StockWriter`), `trust_objects` for a load planner (see
            `StockLoadPlanner`).

    Raises:
        TypeError: `value` is none of these, or its adapter lacks the option.
    """
    if isinstance(value, Wrapper) and isinstance(value, _STOCKS):
        return value.wrapped
    if isinstance(value, _OURS):
        return value
    adapters: dict[type[Any], Callable[..., Any]] = {
        storage.StorageWriter: StockStagingWriter if is_stager(value) else StockWriter,
        storage.StorageReader: StockReader,
        planner.SavePlanner: StockSavePlanner,
        planner.LoadPlanner: StockLoadPlanner,
        metadata.Metadata: as_metadata,
    }
    return _adapted(value, adapters, options, "torch.distributed.checkpoint")


@overload
def to_stock(value: StorageWriter, *, save_id: str | None = ...) -> storage.StorageWriter: ...
@overload
def to_stock(value: StorageReader, *, trust_objects: bool = ...) -> storage.StorageReader: ...
@overload
def to_stock(value: SavePlanner) -> planner.SavePlanner: ...
@overload
def to_stock(value: LoadPlanner) -> planner.LoadPlanner: ...
@overload
def to_stock(value: Metadata) -> metadata.Metadata: ...
def to_stock(value: Any, **options: Any) -> Any:
    """Adapt our storage, planner or `Metadata` for `save` and `load` of `torch.distributed.checkpoint`.

    Args:
        value: Our object. A `from_stock` adapter is unwrapped; stock's objects are returned unchanged.
        options: `save_id` for a writer (see `WriterForStock`), `trust_objects` for a reader (see `ReaderForStock`).

    Raises:
        TypeError: `value` is none of these, or its adapter lacks the option.
    """
    if isinstance(value, Wrapper) and isinstance(value, _OURS):
        return value.wrapped
    if isinstance(value, _STOCKS):
        return value
    adapters: dict[type[Any], Callable[..., Any]] = {
        StorageWriter: WriterForStock,
        StorageReader: ReaderForStock,
        SavePlanner: SavePlannerForStock,
        LoadPlanner: LoadPlannerForStock,
        Metadata: stock_metadata,
    }
    return _adapted(value, adapters, options, "dcp_core")


def _adapted(value: object, adapters: Mapping[type, Callable[..., Any]], options: Mapping[str, Any], side: str) -> Any:
    adapter = next((adapter for kind, adapter in adapters.items() if isinstance(value, kind)), None)
    if adapter is None:
        kind = type(value)
        raise TypeError(f"{kind.__module__}.{kind.__qualname__} is not a storage, planner or Metadata of {side}")
    return adapter(value, **options)
