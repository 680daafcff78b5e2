"""Registration of the format `peft`. Does not import torch."""

from dcp_base import hookimpl


@hookimpl
def dcp_register_converters() -> dict[str, str]:
    """Return format → import path of its converter."""
    return {"peft": "dcp_transformers.export:PeftConverter"}
