"""Export of a sharded model to whole safetensors files, beside a checkpoint of it and PyTorch's save and consolidation.

    python -m integration_tests.benchmarks.export --ranks 1 2 4 8 --mib 2048 --page

The contenders take turns, each round in the other order; the first round warms up. Each save goes to a new folder on a
disk and ends with an fsync, but for PyTorch's, which has none. Prints the tables as Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from integration_tests.benchmarks.environments import ROOT
from integration_tests.benchmarks.figures import paired
from integration_tests.benchmarks.folders import DEFAULT_PLACES, remove, settle
from integration_tests.benchmarks.pages import replace_figures
from integration_tests.launcher import launcher_store, rank_environment

__all__ = ["MODULE", "tables"]

MODULE = "integration_tests.benchmarks.export"
PAGE = ROOT / "docs" / "formats.md"
_ROWS, _COLUMNS = 2048, 8192
_CHECKPOINT, _EXPORT, _STOCK = "checkpoint", "export", "stock"
_MIB = 1 << 20
Figures = dict[str, list[dict[str, float]]]


def _state(dim: int, mib: int) -> dict[str, Any]:
    """Tensors of 32 MiB in bf16, sharded by rows (0) or by columns (1) over all ranks."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    shape = [_ROWS, _COLUMNS]
    shape[dim] //= size
    found: dict[str, Any] = {}
    for number in range(mib * _MIB // (2 * _ROWS * _COLUMNS)):
        local = torch.full(shape, number + dist.get_rank() / 8, dtype=torch.bfloat16)
        found[f"layers.{number}.weight"] = DTensor.from_local(local, mesh, [Shard(dim)])
    return found


def _contenders(state: dict[str, Any]) -> dict[str, Callable[[str], object]]:
    import dcp_all as dcp

    def stock(folder: str) -> None:
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            writer = HuggingFaceStorageWriter(folder, save_distributed=True, enable_consolidation=True)
            save(state, storage_writer=writer)

    return {
        _CHECKPOINT: lambda folder: dcp.save(state, checkpoint_id=folder),
        _EXPORT: lambda folder: dcp.save_safetensors(state, folder, max_file_bytes=1 << 40),
        _STOCK: stock,
    }


def _run_rank(arguments: argparse.Namespace) -> None:
    """Measure on one rank; rank 0 prints the slowest rank's seconds, the largest memory and the sums of the bytes."""
    import torch.distributed as dist

    from integration_tests.benchmarks.workers.meter import give_back_freed_blocks, measure

    give_back_freed_blocks()
    dist.init_process_group("gloo")
    state = _state(arguments.dim, arguments.mib)
    contenders = _contenders(state)
    found: Figures = {name: [] for name in contenders}
    for turn in range(arguments.rounds + 1):
        for name in sorted(contenders, reverse=bool(turn % 2)):
            if name == _STOCK and turn > arguments.stock_rounds:
                continue
            folder = arguments.folder / f"{name}-{turn}"
            settle()
            dist.barrier()

            def act(name: str = name, folder: Path = folder) -> None:
                contenders[name](str(folder))
                dist.barrier()

            cost = measure(act)
            costs: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(costs, cost)
            found[name].append(
                {
                    "seconds": max(one["seconds"] for one in costs),
                    "peak_bytes": max(one["peak_bytes"] for one in costs),
                    "written": sum(one["wchar"] for one in costs),
                    "read": sum(one["rchar"] for one in costs),
                }
            )
            if dist.get_rank() == 0:
                remove(folder)
    if dist.get_rank() == 0:
        print(json.dumps({name: rounds[1:] or rounds for name, rounds in found.items()}))
    dist.destroy_process_group()


def _measure(ranks: int, dim: int, arguments: argparse.Namespace) -> Figures:
    store = launcher_store()
    with tempfile.TemporaryDirectory(prefix="dcp-export-", dir=arguments.place) as folder:
        command = [sys.executable, "-m", MODULE, "--rank", "--dim", str(dim), "--folder", folder]
        for name in ("mib", "rounds", "stock_rounds"):
            command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
        processes = [
            subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **rank_environment(rank, ranks, store.port)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"{ranks} ranks: exit codes {[process.returncode for process in processes]}")
    figures: Figures = json.loads(outputs[0].splitlines()[-1])
    return figures


def tables(measured: dict[tuple[int, int], Figures], nbytes: int) -> Iterator[str]:
    """Markdown of what was measured.

    Args:
        measured: (sharded dimension, number of ranks) → contender → its rounds.
        nbytes: Size of the model in bytes.
    """
    yield (
        "| sharded by | ranks | checkpoint, s | export, s | export ÷ checkpoint | PyTorch, s "
        "| bytes written ÷ model | read ÷ model | PyTorch's: written, read | memory of a rank, MiB |"
    )
    yield "| --- " + "| ---: " * 9 + "|"
    for (dim, ranks), figures in measured.items():
        seconds = {name: [one["seconds"] for one in rounds] for name, rounds in figures.items()}
        middle = {name: f"{statistics.median(values):.2f}" for name, values in seconds.items()}
        ratio = paired(seconds[_EXPORT], seconds[_CHECKPOINT])
        assert ratio is not None
        moved = {
            name: [f"{statistics.median(one[what] for one in rounds) / nbytes:.2f}" for what in ("written", "read")]
            for name, rounds in figures.items()
        }
        peak = max(one["peak_bytes"] for one in figures[_EXPORT]) / _MIB
        yield (
            f"| {('rows', 'columns')[dim]} | {ranks} | {middle[_CHECKPOINT]} | {middle[_EXPORT]} "
            f"| {ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f}) | {middle[_STOCK]} "
            f"| {' | '.join(moved[_EXPORT])} | {', '.join(moved[_STOCK])} | {peak:.0f} |"
        )


def _kept(path: Path | None, mib: int) -> dict[tuple[int, int], Figures]:
    """Figures of earlier runs with a model of the same size."""
    if path is None or not path.exists():
        return {}
    found = json.loads(path.read_text())
    return {(key[0], key[1]): figures for key, figures in found["measured"] if found["mib"] == mib}


def main() -> int:
    """Measure and print; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--dims", type=int, nargs="+", default=[0, 1], help="0: shards of rows, 1: of columns")
    parser.add_argument("--mib", type=int, default=2048, help="size of the model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stock-rounds", type=int, default=5, help="how many of the rounds PyTorch takes part in")
    parser.add_argument("--place", default=DEFAULT_PLACES["disk"], help="a folder on the disk to measure")
    parser.add_argument("--json", type=Path, help="keep the figures here, beside those of earlier runs of that size")
    parser.add_argument("--page", action="store_true", help=f"write the tables into {PAGE.name}")
    for name, kind in (("--dim", int), ("--folder", Path)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        _run_rank(arguments)
        return 0
    measured = _kept(arguments.json, arguments.mib)
    for dim in arguments.dims:
        for ranks in arguments.ranks:
            start = time.perf_counter()
            measured[dim, ranks] = _measure(ranks, dim, arguments)
            print(f"{ranks} ranks: {time.perf_counter() - start:.0f} s", file=sys.stderr)
            if arguments.json is not None:
                text = json.dumps({"mib": arguments.mib, "measured": [*measured.items()]})
                arguments.json.write_text(text)
    lines = list(tables(dict(sorted(measured.items())), arguments.mib * _MIB))
    print("\n".join(lines))
    if arguments.page:
        replace_figures(PAGE, MODULE, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
