"""Storages and planners of `torch.distributed.checkpoint` with ours, and ours with it.

The only package that imports stock. What files look like, and what reads them, is elsewhere: these classes translate
calls and records.
"""

from dcp_bridge.bridging import from_stock, to_stock
from dcp_bridge.load_planners import LoadPlannerForStock, StockLoadPlanner
from dcp_bridge.readers import ReaderForStock, StockReader
from dcp_bridge.save_planners import SavePlannerForStock, StockSavePlanner
from dcp_bridge.stock_writer import StockStagingWriter, StockWriter
from dcp_bridge.writer_for_stock import WriterForStock

__all__ = [
    "LoadPlannerForStock",
    "ReaderForStock",
    "SavePlannerForStock",
    "StockLoadPlanner",
    "StockReader",
    "StockSavePlanner",
    "StockStagingWriter",
    "StockWriter",
    "WriterForStock",
    "from_stock",
    "to_stock",
]
