"""Adapters between this project and stock: storages, planners and metadata of either can be used in both.

The only package that imports stock (`torch.distributed.checkpoint`). Adapters translate calls and records, not files;
`replace_stock` replaces the functions and classes of stock by ours in a process. Stock is imported on the first use of
a name in this package: the search for plug-ins imports this package in every process, and must not import stock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_hooks import import_lazily

if TYPE_CHECKING:
    from dcp_bridge.bridging import from_stock, to_stock
    from dcp_bridge.load_planners import LoadPlannerForStock, StockLoadPlanner
    from dcp_bridge.readers import ReaderForStock, StockReader
    from dcp_bridge.replacement.mirror import UntestedTorchError
    from dcp_bridge.replacement.replacement import Replacement, original_stock, replace_stock
    from dcp_bridge.save_planners import SavePlannerForStock, StockSavePlanner
    from dcp_bridge.stock_writer import StockStagingWriter, StockWriter
    from dcp_bridge.writer_for_stock import WriterForStock

__all__ = [
    "LoadPlannerForStock",
    "ReaderForStock",
    "Replacement",
    "SavePlannerForStock",
    "StockLoadPlanner",
    "StockReader",
    "StockSavePlanner",
    "StockStagingWriter",
    "StockWriter",
    "UntestedTorchError",
    "WriterForStock",
    "from_stock",
    "original_stock",
    "replace_stock",
    "to_stock",
]

__getattr__, __dir__ = import_lazily(
    __name__,
    {
        "dcp_bridge.bridging": ("from_stock", "to_stock"),
        "dcp_bridge.load_planners": ("LoadPlannerForStock", "StockLoadPlanner"),
        "dcp_bridge.readers": ("ReaderForStock", "StockReader"),
        "dcp_bridge.replacement.mirror": ("UntestedTorchError",),
        "dcp_bridge.replacement.replacement": ("Replacement", "original_stock", "replace_stock"),
        "dcp_bridge.save_planners": ("SavePlannerForStock", "StockSavePlanner"),
        "dcp_bridge.stock_writer": ("StockStagingWriter", "StockWriter"),
        "dcp_bridge.writer_for_stock": ("WriterForStock",),
    },
)
