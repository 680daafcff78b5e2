"""Conversions and sharded loads of other formats, beside stock and a raw copy of the bytes; each in a fresh process.

`python -m integration_tests.benchmarks.formats [--mib N] [--rounds N] [--folder PATH] [--json PATH] [--page PAGE]`
prints medians: seconds, peak resident memory above the start (file pages that are mapped included), ratios. Bars: time
÷ raw copy of the bytes ≤ 1.5 with at most 64 MiB; a load from safetensors on 4 ranks ≤ 0.6 of stock's time, ≤ 1.1× the
bytes needed; the command starts in 0.4 s.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from integration_tests.benchmarks.command_start import start_seconds
from integration_tests.benchmarks.figures import faster
from integration_tests.benchmarks.pages import replace_figures

__all__ = ["CASES", "compare", "lines", "main"]

MIB = 1 << 20
RANKS = 4
_MODULE = "integration_tests.benchmarks.formats"
_COMMAND, _LOAD = "the command", f"safetensors onto {RANKS} ranks"
Figures = dict[str, float]


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class _Peak:
    """Watches this process's resident memory while a block runs."""

    def __enter__(self) -> _Peak:
        self.start = self.highest = _resident_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        self.began = time.perf_counter()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.highest = max(self.highest, _resident_bytes())

    def __exit__(self, *error: object) -> None:
        self.seconds = time.perf_counter() - self.began
        self._stop.set()
        self._thread.join()

    def figures(self) -> Figures:
        return {"seconds": self.seconds, "extra_mib": (self.highest - self.start) / MIB}


def _tensors(mib: int) -> dict[str, Any]:
    """bf16 matrices of 32 MiB (or less), random so that nothing compresses."""
    import torch

    torch.manual_seed(0)
    rows = max(RANKS, min(mib, 32) * MIB // (4096 * 2))
    return {f"layers.{n}.weight": torch.randn(rows, 4096).to(torch.bfloat16) for n in range(max(1, mib // 32))}


def make(folder: Path, mib: int) -> None:
    """The sources: a checkpoint, a torch.save file and a safetensors folder of the same tensors."""
    import torch
    from safetensors.torch import save_file

    import dcp_all as dcp

    state = _tensors(mib)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder / "checkpoint"))
    torch.save(state, folder / "model.pt")
    (folder / "hf").mkdir()
    names, files = [*state], max(1, mib // 512)
    weight_map: dict[str, str] = {}
    for number in range(files):
        part = {name: state[name] for name in names[number::files]}
        file = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        save_file(part, folder / "hf" / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))


def _copy(source: Path, destination: Path) -> None:
    """The floor: every byte read and written once, durably."""
    destination.parent.mkdir(exist_ok=True)
    files = sorted(source.iterdir()) if source.is_dir() else [source]
    buffer = bytearray(4 * MIB)
    with destination.open("wb", buffering=0) as out:
        for file in files:
            with file.open("rb", buffering=0) as data:
                while count := data.readinto(buffer):
                    out.write(memoryview(buffer)[:count])
        os.fsync(out.fileno())


def _convert(source: str, destination: str, **options: Any) -> Callable[[Path, Path], None]:
    def run(folder: Path, out: Path) -> None:
        import dcp_all as dcp

        dcp.convert(folder / source, out / destination, **options)

    return run


def _stock_to_torch(folder: Path, out: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(folder / "checkpoint", out / "model.pt")


def _stock_to_checkpoint(folder: Path, out: Path) -> None:
    from torch.distributed.checkpoint.format_utils import torch_save_to_dcp

    torch_save_to_dcp(folder / "model.pt", out / "checkpoint")


def _copying(source: str) -> Callable[[Path, Path], None]:
    return lambda folder, out: _copy(folder / source, out / "copy")


Side = Callable[[Path, Path], None]
CASES: dict[str, dict[str, Side]] = {
    "checkpoint → torch.save": {
        "ours": _convert("checkpoint", "model.pt"),
        "stock": _stock_to_torch,
        "copy": _copying("checkpoint"),
    },
    "torch.save → checkpoint": {
        "ours": _convert("model.pt", "checkpoint"),
        "stock": _stock_to_checkpoint,
        "copy": _copying("model.pt"),
    },
    "checkpoint → safetensors": {
        "ours": _convert("checkpoint", "out.hf"),
        "copy": _copying("checkpoint"),
    },
    "safetensors → checkpoint": {
        "ours": _convert("hf", "checkpoint", format="checkpoint"),
        "copy": _copying("hf"),
    },
}


def _load_sharded(library: Any, folder: Path) -> Figures:
    """One rank's load of its rows from the safetensors folder; all ranks begin together."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, zeros

    metadata = library.HuggingFaceStorageReader(str(folder / "hf")).read_metadata()
    mesh = init_device_mesh("cpu", (RANKS,))
    state = {
        name: zeros(*entry.size, dtype=torch.bfloat16, device_mesh=mesh, placements=[Shard(0)])
        for name, entry in metadata.state_dict_metadata.items()
    }
    seconds = []
    for _ in range(2):  # what a process does once, such as importing, is in the first
        reader = library.HuggingFaceStorageReader(str(folder / "hf"))
        dist.barrier()
        with _Peak() as peak:
            library.load(state, storage_reader=reader)
            dist.barrier()
        seconds.append(peak.seconds)
    figures = {**peak.figures(), "first_seconds": seconds[0]}
    if hasattr(reader, "bytes_read"):
        figures["read_ratio"] = reader.bytes_read / sum(value.to_local().nbytes for value in state.values())
    return figures


def _rank(folder: Path, side: str, rank: int, store: str) -> Figures:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    library = importlib.import_module("dcp_all" if side == "ours" else "torch.distributed.checkpoint")
    figures = _load_sharded(library, folder)
    dist.destroy_process_group()
    return figures


def _worker(arguments: Sequence[str]) -> None:
    kind, folder, *rest = arguments
    warnings.simplefilter("ignore")
    if kind == "make":
        make(Path(folder), int(rest[0]))
        figures: Figures = {}
    elif kind == "rank":
        figures = _rank(Path(folder), rest[0], int(rest[1]), rest[2])
    else:
        case, side = rest
        import torch

        import dcp_all  # noqa: F401 - what is imported is not what is measured
        import dcp_format.converters  # noqa: F401

        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory(dir=folder) as out:
            with _Peak() as peak:
                CASES[case][side](Path(folder), Path(out))
            figures = peak.figures()
    print(json.dumps(figures))


def _run(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", _MODULE, "--worker", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _figures(process: subprocess.Popen[str]) -> Figures:
    out, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{process.args!r} ended with {process.returncode}")
    found: Figures = json.loads(out.splitlines()[-1])
    return found


def _load_round(folder: Path, side: str) -> Figures:
    with tempfile.TemporaryDirectory() as scratch:
        ranks = [_run("rank", str(folder), side, str(rank), f"{scratch}/store") for rank in range(RANKS)]
        each = [_figures(process) for process in ranks]
    return {name: max(figures[name] for figures in each) for name in each[0]}


def compare(mib: int = 2048, rounds: int = 5, folder: str | None = None) -> dict[str, dict[str, Figures]]:
    """Medians by case and side, sides taken in turn; `ratio` is ours ÷ the copy, for loads ours ÷ stock's."""
    results: dict[str, dict[str, Figures]] = {}
    with tempfile.TemporaryDirectory(dir=folder, prefix="dcp-bench-") as scratch:
        place = Path(scratch)
        _figures(_run("make", str(place), str(mib)))
        for case, sides in CASES.items():
            taken: dict[str, list[Figures]] = {side: [] for side in sides}
            for _ in range(rounds):
                for side, found in taken.items():
                    found.append(_figures(_run("case", str(place), case, side)))
            results[case] = {side: _medians(each) for side, each in taken.items()}
            ours = results[case]["ours"]
            ours["ratio"] = ours["seconds"] / results[case]["copy"]["seconds"]
        loads: dict[str, list[Figures]] = {"ours": [], "stock": []}
        for _ in range(rounds):
            for side, each in loads.items():
                each.append(_load_round(place, side))
        medians = {side: _medians(each) for side, each in loads.items()}
        for name, figure in (("ratio", "seconds"), ("first_ratio", "first_seconds")):
            medians["ours"][name] = medians["ours"][figure] / medians["stock"][figure]
        results[_LOAD] = medians
        results[_COMMAND] = {
            f"dcp {command}": {"seconds": statistics.median(clock), "cpu_seconds": statistics.median(cpu)}
            for command, found in start_seconds(place / "checkpoint", rounds).items()
            for clock, cpu in [[*zip(*found, strict=True)]]
        }
    return results


def _medians(rounds: Sequence[Figures]) -> Figures:
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def lines(results: Mapping[str, Mapping[str, Figures]]) -> list[str]:
    """The figures as Markdown."""
    table = [
        "| conversion | ours, s | ÷ a copy of the bytes | MiB above the start | PyTorch, s | MiB above the start |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for case in CASES:
        ours, stock = results[case]["ours"], results[case].get("stock")
        theirs = ("–", "–") if stock is None else (f"{stock['seconds']:.2f}", f"{stock['extra_mib']:.0f}")
        numbers = (f"{ours['seconds']:.2f}", f"{ours['ratio']:.2f}", f"{ours['extra_mib']:.0f}", *theirs)
        table.append(f"| {case} | {' | '.join(numbers)} |")
    ours = results[_LOAD]["ours"]
    starts = ", ".join(f"`{name}` {each['seconds']:.2f} s" for name, each in results[_COMMAND].items())
    return [
        *table,
        "",
        f"A load from a safetensors folder onto {RANKS} ranks takes {ours['seconds']:.2f} s, and is",
        f"{faster(ours['ratio'])} than PyTorch's reader (the first one in a process",
        f"{faster(ours['first_ratio'])}). It reads",
        f"{ours['read_ratio']:.3f} times the bytes that the ranks need.",
        f"From start to end: {starts}.",
    ]


def main(given: Sequence[str]) -> None:
    """Measure, and print a line per case and side."""
    if given[:1] == ["--worker"]:
        _worker(given[1:])
        return
    parser = argparse.ArgumentParser(prog=f"python -m {_MODULE}", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mib", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where the files go; a disk with room for three times their size")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--page", type=Path, help="write them between the marks of this page")
    parser.add_argument("--from-json", type=Path, help="measure nothing: take these figures")
    options = parser.parse_args(given)
    if options.from_json is None:
        results = compare(options.mib, options.rounds, options.folder)
    else:
        results = json.loads(options.from_json.read_text())
    for case, sides in results.items():
        for side, figures in sides.items():
            numbers = "  ".join(f"{name} {value:.3f}" for name, value in figures.items())
            print(f"{case:26} {side:6} {numbers}")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    if options.page is not None:
        replace_figures(options.page, _MODULE, lines(results))


if __name__ == "__main__":
    main(sys.argv[1:])
