"""Who takes part: each library, the settings it runs with, and the environment that it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["CONTENDERS", "ENVIRONMENTS", "FLOOR", "OURS", "Contender"]

ENVIRONMENTS: Mapping[str, tuple[str, ...] | None] = {
    "shared": None,  # the one that the harness itself runs in
    "safetensors": ("safetensors==0.8.0", "torch", "numpy", "packaging"),
    "torchsnapshot": ("torchsnapshot==0.1.0", "torch", "numpy"),
    "torch_checkpointing": ("torch_checkpointing==0.1.1", "torch", "numpy"),
    "orbax": ("orbax-checkpoint==0.12.8",),
    "zipnn": (
        *(
            "zipnn==0.5.4",
            "torch",
            "numpy",
            "backports.zstd",
            "zstandard",
            "isal",
            "pluggy",
            "safetensors",
            "typing_extensions",
        ),
        *("click", "fsspec", "obstore", "psutil", "rich"),
    ),
    "s3torchconnector": (
        *("s3torchconnector==1.5.0", "s3torchconnectorclient==1.5.0", "tenacity", "torch", "numpy"),
        *("click", "fsspec", "isal", "obstore", "pluggy", "psutil", "rich", "s3fs", "safetensors"),
        *("pytest", "typing_extensions", "zstandard"),
    ),
}
"""Name → what pip installs, through `constraints.txt`."""

OURS, FLOOR = "ours", "raw floor"


@dataclass(frozen=True, slots=True)
class Contender:
    """One library with one setting.

    Args:
        name: As tables show it.
        worker: Module of `workers`.
        environment: Key of `ENVIRONMENTS`.
        save: Options of its saves; None where only loads are of interest, which then need `loads_from`.
        loads: Operation → options. `load` is verified as the library does by default.
        multi_rank: Whether it takes part where several ranks share a state.
        fsync: `itself` (asked to), `explicit` (the harness flushes its files within the time) or `always`.
        only: The cases it takes part in; None for all.
        note: What a reader of the tables must know.
    """

    name: str
    worker: str
    environment: str = "shared"
    save: Mapping[str, Any] = field(default_factory=dict)
    loads: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"load": {}})
    multi_rank: bool = False
    fsync: str = "itself"
    only: tuple[str, ...] | None = None
    note: str = ""


_OUR_LOADS: Mapping[str, Mapping[str, Any]] = {"load": {}, "load, unverified": {"verify": False}}

CONTENDERS = (
    Contender(
        OURS,
        "ours",
        save={"layout": "torch"},
        loads=_OUR_LOADS,
        multi_rank=True,
        note="default settings; loads verified",
    ),
    Contender("ours, raw layout", "ours", save={"layout": "raw"}, loads=_OUR_LOADS, multi_rank=True),
    Contender(
        "ours, raw, interop=False",
        "ours",
        save={"layout": "raw", "interop": False},
        loads=_OUR_LOADS,
        only=("scalars",),
        note="the index is ours alone",
    ),
    Contender("stock, 1 thread", "stock", save={"thread_count": 1}, multi_rank=True, note="its default"),
    Contender(
        "stock, 2 threads",
        "stock",
        save={"thread_count": 2},
        multi_rank=True,
        note="threads are for saving; loading is serial",
    ),
    Contender(
        "safetensors",
        "safetensors_file",
        "safetensors",
        loads={"load": {}, "load, new tensors": {"in_place": False}},
        fsync="explicit",
        note="in place: `load_file`, then a copy, as `load_model` does; new tensors: views of the mapped file, "
        "most of it not read when the call returns",
    ),
    Contender("torchsnapshot", "torchsnapshot_take", "torchsnapshot", fsync="explicit"),
    Contender(
        "torch_checkpointing",
        "torch_checkpointing_manager",
        "torch_checkpointing",
        fsync="explicit",
        note="saving synchronously, `use_direct_io=False`: its default fails on ext4",
    ),
    Contender(
        "Orbax",
        "orbax_tree",
        "orbax",
        fsync="always",
        note="numpy arrays, bfloat16 by ml_dtypes; compresses; loads make new arrays",
    ),
    Contender(
        FLOOR,
        "floor",
        multi_rank=True,
        note="`pwritev` (and fsync) and parallel `preadv` of the same memory, with as many threads and files as we "
        "use; no names, checksums, index or publish",
    ),
)
