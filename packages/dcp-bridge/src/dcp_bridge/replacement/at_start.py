"""Module that `dcp_replace_stock.pth` imports at the start of Python if `DCP_REPLACE_STOCK` is set."""

from dcp_bridge.replacement.at_import import follow_environment

__all__: list[str] = []

follow_environment()
