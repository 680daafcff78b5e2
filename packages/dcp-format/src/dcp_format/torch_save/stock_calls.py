"""`dcp_to_torch_save`, `torch_save_to_dcp`: conversions under stock's names, and stock's command line.

Source: torch 2.13 `torch.distributed.checkpoint.format_utils` (names, parameters, arguments and output of the script).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from dcp_format.checkpoints.checkpoint import open_checkpoint, write_checkpoint
from dcp_format.content.content import WriteOptions
from dcp_format.torch_save.torch_save_read import open_torch_save
from dcp_format.torch_save.torch_save_write import write_torch_save

_INFLIGHT_BYTES = 16 << 20


def dcp_to_torch_save(
    dcp_checkpoint_dir: str | os.PathLike[str],
    torch_save_path: str | os.PathLike[str],
    *,
    max_inflight_bytes: int = _INFLIGHT_BYTES,
    allow_globals: Sequence[Any] = (),
) -> None:
    """Convert a checkpoint of this project or of stock to one `torch.save` file, which appears only when complete.

    An existing file is replaced. `torch.load` opens the file with `mmap=True`, and also with `weights_only=True` if the
    objects in the file allow it. `allow_globals`: classes and functions that objects may use in addition to the default
    allow-list.

    Raises:
        CheckpointNotFoundError, CorruptCheckpointError, UnsafeCheckpointError: The checkpoint cannot be read.

    Ranks: one; not collective.
    """
    content = open_checkpoint(dcp_checkpoint_dir)
    options = WriteOptions(max_inflight_bytes, overwrite=True)
    write_torch_save(content, torch_save_path, options, allow_globals=allow_globals)


def torch_save_to_dcp(
    torch_save_path: str | os.PathLike[str],
    dcp_checkpoint_dir: str | os.PathLike[str],
    *,
    max_inflight_bytes: int = _INFLIGHT_BYTES,
    allow_globals: Sequence[Any] = (),
) -> None:
    """Convert a `torch.save` file of a mapping to a checkpoint; runs no code from the file.

    A checkpoint in the folder is replaced. `allow_globals`: see `dcp_to_torch_save`.

    Raises:
        CheckpointNotFoundError, CorruptCheckpointError, UnsafeCheckpointError: The file cannot be read.
        UnsupportedValueError: The saved value is not a mapping.

    Ranks: one; not collective.
    """
    content = open_torch_save(torch_save_path, allow_globals=allow_globals)
    try:
        write_checkpoint(content, dcp_checkpoint_dir, WriteOptions(max_inflight_bytes, overwrite=True))
    finally:
        content.close()


_MODES: dict[str, tuple[Callable[[str], bool], Callable[[str, str], None]]] = {
    "torch_to_dcp": (os.path.isfile, torch_save_to_dcp),
    "dcp_to_torch": (os.path.isdir, dcp_to_torch_save),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run stock's `format_utils` command line; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m dcp_all.format_utils")
    parser.add_argument("mode", choices=list(_MODES), help="Conversion mode")
    parser.add_argument("src", help="Path to the source model")
    parser.add_argument("dst", help="Path to the destination model")
    chosen = parser.parse_args(arguments)
    is_there, convert = _MODES[chosen.mode]
    sys.stdout.write(f"Converting checkpoint from {chosen.src} to {chosen.dst} using method: '{chosen.mode}'\n")
    if not is_there(chosen.src):
        sys.stdout.write(f"No checkpoint found at {chosen.src}. Skipping conversion.\n")
        return 1
    convert(chosen.src, chosen.dst)
    return 0
