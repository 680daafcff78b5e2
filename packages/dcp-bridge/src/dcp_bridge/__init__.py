"""Adapters between this project and stock: use either's storages, planners and metadata in both.

Only this package imports stock (`torch.distributed.checkpoint`), on first use of a name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_base import import_lazily

if TYPE_CHECKING:
    from dcp_bridge.bridging import from_stock as from_stock
    from dcp_bridge.bridging import to_stock as to_stock
    from dcp_bridge.replacement.replacement import original_stock as original_stock
    from dcp_bridge.replacement.replacement import replace_stock as replace_stock

__getattr__, __dir__ = import_lazily(
    __name__,
    {
        "dcp_bridge.bridging": ("from_stock", "to_stock"),
        "dcp_bridge.replacement.replacement": ("original_stock", "replace_stock"),
    },
)
