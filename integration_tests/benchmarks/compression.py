"""What compression saves and costs: `python -m integration_tests.benchmarks.compression --help`.

Size, and encoding and decoding on one core, of real data beside stock's Zstandard transform and zipnn; then whole
saves to a disk with fsync. All runs in one process, in an environment that has zipnn, made on first use.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from integration_tests.benchmarks.environments import ROOT, python_of
from integration_tests.benchmarks.pages import replace_figures

__all__ = ["CODECS", "Figure", "compare_codecs", "compare_saves", "parts"]

_GIB = 1 << 30
_TRAIN_STEPS = 120
_MODULE = "integration_tests.benchmarks.compression"


@dataclass(frozen=True, slots=True)
class Figure:
    """One codec on one part of the data; seconds are medians over the rounds."""

    part: str
    codec: str
    size: float
    """Encoded bytes ÷ bytes."""
    encode_gb_per_second: float
    decode_gb_per_second: float
    encode_speed: float
    """Median over the rounds of: speed ÷ that of stock in the same round."""
    decode_speed: float


class Codec(Protocol):
    """One library: encodes a tensor into a sink, and decodes what it encoded into memory that is there already."""

    def encode(self, tensor: torch.Tensor, sink: Sink) -> Any: ...

    def decode(self, data: memoryview, told: Any, into: memoryview) -> None: ...


class Sink:
    """Memory in place of a file, so that nobody pays for new pages."""

    def __init__(self, nbytes: int) -> None:
        self._memory = memoryview(bytearray(b"\1") * nbytes)
        self.position = 0

    def write(self, data: Any) -> int:
        """Append bytes."""
        view = memoryview(data).cast("B")
        self._memory[self.position : self.position + len(view)] = view
        self.position += len(view)
        return len(view)

    def flush(self) -> None:
        """Nothing."""

    def part(self, start: int, stop: int) -> memoryview:
        """What was written there."""
        return self._memory[start:stop]


def parts(weights: Path | None) -> dict[str, list[torch.Tensor]]:
    """Name → tensors: real weights, the parts of a trained model's state, and noise as a control."""
    found: dict[str, list[torch.Tensor]] = {}
    if weights is not None:
        from safetensors.torch import load_file

        real = [tensor for tensor in load_file(weights).values() if tensor.is_floating_point()]
        found["MiniLM, bf16"] = [tensor.bfloat16() for tensor in real]
        found["MiniLM, fp32"] = [tensor.float() for tensor in real]
    model, optimizer = _trained()
    found["trained model, fp32"] = [parameter.detach() for parameter in model.parameters()]
    found["trained model, bf16"] = [parameter.detach().bfloat16() for parameter in model.parameters()]
    for name in ("exp_avg", "exp_avg_sq"):
        found[f"its AdamW {name}, fp32"] = [state[name] for state in optimizer.state.values()]
    found["its whole state, fp32"] = [
        *found["trained model, fp32"],
        *found["its AdamW exp_avg, fp32"],
        *found["its AdamW exp_avg_sq, fp32"],
    ]
    noise = torch.randn(16 << 20, generator=torch.Generator().manual_seed(0)) * 0.02
    found["noise, bf16"] = [noise.bfloat16()]
    return found


def _trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    from integration_tests.demo.corpus import Corpus
    from integration_tests.demo.model import ByteTransformer

    torch.manual_seed(0)
    model, corpus = ByteTransformer(), Corpus()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(_TRAIN_STEPS):
        batch = corpus.batch(step, rows=8, length=128, rank=0, world_size=1)
        loss = torch.nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model, optimizer


def _bytes(tensor: torch.Tensor) -> memoryview:
    from dcp_core.tensors.tensor_memory import tensor_bytes

    return tensor_bytes(tensor.contiguous())


class _Ours:
    """A setting of `compression`, as the writer applies it: sampling, cutting into blocks and all."""

    def __init__(self, setting: str) -> None:
        from dcp_core.block_transforms import BlockUndo
        from dcp_core.encoding.compression import CompressionPolicy
        from dcp_core.transforms import ExtensionRegistry

        self._policy = CompressionPolicy(setting)
        self._undo: Callable[[Sequence[str]], BlockUndo] = lambda names: BlockUndo(
            ExtensionRegistry().from_descriptor_list(names)  # type: ignore[arg-type]
        )

    def encode(self, tensor: torch.Tensor, sink: Sink) -> Any:
        from dcp_core.storage.storage_writer import tensor_payload

        payload = self._policy.apply("t", tensor_payload("t", tensor))
        data = _bytes(tensor)
        if payload.blocks is None:
            sink.write(data)
            return None
        step = payload.blocks.block_bytes
        lengths = [sink.write(payload.blocks.encode(data[start : start + step])) for start in range(0, len(data), step)]
        return step, lengths, payload.blocks.descriptors

    def decode(self, data: memoryview, told: Any, into: memoryview) -> None:
        if told is None:
            into[:] = data
            return
        step, lengths, names = told
        undo, position = self._undo(names), 0
        for number, length in enumerate(lengths):
            undo.decode(data[position : position + length], into[number * step : (number + 1) * step])
            position += length


class _Stock:
    """Stock's transform, over what it is given: a whole payload at once."""

    def __init__(self) -> None:
        from torch.distributed.checkpoint._extension import ZStandard

        self._transform = ZStandard()

    def encode(self, tensor: torch.Tensor, sink: Sink) -> Any:
        stream = self._transform.transform_to(sink)  # type: ignore[arg-type]
        stream.write(_bytes(tensor))
        stream.flush()

    def decode(self, data: memoryview, told: Any, into: memoryview) -> None:
        del told
        stream = self._transform.transform_from(io.BytesIO(data))
        position = 0
        while position < len(into) and (piece := stream.read(1 << 20)):
            into[position : position + len(piece)] = piece
            position += len(piece)


class _ZipNN:
    """zipnn with one thread, for the element types that it knows."""

    def __init__(self) -> None:
        self._zipnn: Any = importlib.import_module("zipnn").ZipNN

    def encode(self, tensor: torch.Tensor, sink: Sink) -> Any:
        name = str(tensor.dtype).removeprefix("torch.")
        # It rearranges the bytes that it is given in place.
        data = bytearray(_bytes(tensor))
        sink.write(self._zipnn(bytearray_dtype=name, input_format="byte", threads=1).compress(data))
        return name

    def decode(self, data: memoryview, told: Any, into: memoryview) -> None:
        into[:] = self._zipnn(bytearray_dtype=told, input_format="byte", threads=1).decompress(bytes(data))


CODECS: Mapping[str, Callable[[], Codec]] = {
    "stock's zstd": _Stock,
    "auto": lambda: _Ours("auto"),
    "planes": lambda: _Ours("planes"),
    "block.zstd": lambda: _Ours("block.zstd/1"),
    "zipnn": _ZipNN,
}


def compare_codecs(data: Mapping[str, list[torch.Tensor]], rounds: int, codecs: Sequence[str]) -> list[Figure]:
    """Every codec on every part, in turns within a round; each result is compared with what went in."""
    made = {name: CODECS[name]() for name in codecs}
    figures = []
    for part, tensors in data.items():
        total = sum(tensor.nbytes for tensor in tensors)
        sizes: dict[str, float] = {}
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in codecs}
        sink = Sink(total + total // 8 + (1 << 20))
        decoded = [memoryview(bytearray(b"\1") * tensor.nbytes) for tensor in tensors]
        for turn in range(rounds + 1):
            for name, codec in made.items():
                sink.position = 0
                starts: list[int] = []
                told: list[Any] = []
                start = time.perf_counter()
                for tensor in tensors:
                    starts.append(sink.position)
                    told.append(codec.encode(tensor, sink))
                between = time.perf_counter()
                stops = [*starts[1:], sink.position]
                for first, last, facts, into in zip(starts, stops, told, decoded, strict=True):
                    codec.decode(sink.part(first, last), facts, into)
                if turn:
                    seconds[name].append((between - start, time.perf_counter() - between))
                elif any(one != _bytes(tensor) for one, tensor in zip(decoded, tensors, strict=True)):
                    raise RuntimeError(f"{name} did not give {part} back")
                sizes[name] = sink.position / total
        base = seconds["stock's zstd"]
        for name, pairs in seconds.items():
            encode, decode = (statistics.median(each) for each in zip(*pairs, strict=True))
            against = [
                statistics.median(theirs[side] / ours[side] for theirs, ours in zip(base, pairs, strict=True))
                for side in (0, 1)
            ]
            figures.append(Figure(part, name, sizes[name], total / encode / 1e9, total / decode / 1e9, *against))
    return figures


def compare_saves(folder: Path, total_bytes: int, rounds: int) -> dict[str, Any]:
    """Saves of bf16 weights with fsync and two threads: seconds by contender, and medians of paired ratios."""
    from torch.distributed.checkpoint import filesystem as stock_files
    from torch.distributed.checkpoint import state_dict_saver as stock

    import dcp_all as dcp

    maker = torch.Generator().manual_seed(1)
    count = total_bytes // 64 // 2
    state = {f"layer.{n}.weight": (torch.randn(count, generator=maker) * 0.02).bfloat16() for n in range(64)}
    contenders: dict[str, Callable[[Path], object]] = {
        "auto": lambda path: dcp.save(
            state, storage_writer=dcp.FileSystemWriter(path, thread_count=2, compression="auto"), no_dist=True
        ),
        "plain": lambda path: dcp.save(state, storage_writer=dcp.FileSystemWriter(path, thread_count=2), no_dist=True),
        "stock, plain": lambda path: stock.save(
            state, storage_writer=stock_files.FileSystemWriter(path, thread_count=2), no_dist=True
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    sizes: dict[str, int] = {}
    for turn in range(rounds + 1):
        for name, save in contenders.items():
            path = folder / name.replace(", ", "-")
            shutil.rmtree(path, ignore_errors=True)
            os.sync()
            start = time.perf_counter()
            save(path)
            if turn:
                seconds[name].append(time.perf_counter() - start)
            sizes[name] = sum(file.stat().st_size for file in path.iterdir())
            if name == "auto" and not turn:
                template = {key: torch.zeros_like(value) for key, value in state.items()}
                dcp.load(template, checkpoint_id=path, no_dist=True)
                if not all(torch.equal(template[key], value) for key, value in state.items()):
                    raise RuntimeError("what was loaded is not what was saved")
    return {
        "bytes": total_bytes,
        "seconds": {name: statistics.median(each) for name, each in seconds.items()},
        "sizes": {name: size / total_bytes for name, size in sizes.items()},
        "auto ÷ plain": _paired(seconds, "auto", "plain"),
        "auto ÷ stock, plain": _paired(seconds, "auto", "stock, plain"),
    }


def _paired(seconds: Mapping[str, Sequence[float]], one: str, other: str) -> float:
    return statistics.median(a / b for a, b in zip(seconds[one], seconds[other], strict=True))


def write_page(page: Path, figures: Sequence[Figure], saves: Mapping[str, Any] | None) -> None:
    """Put the figures between the marks of a page."""
    lines = [
        "| data | codec | size ÷ raw | encode, GB/s per core | decode | encode ÷ stock's zstd | decode ÷ stock's |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
        *(
            f"| {each.part} | {each.codec} | {each.size:.4f} | {each.encode_gb_per_second:.2f} "
            f"| {each.decode_gb_per_second:.2f} | {each.encode_speed:.2f} | {each.decode_speed:.2f} |"
            for each in figures
        ),
    ]
    if saves is not None:
        plain, theirs = saves["auto ÷ plain"], saves["auto ÷ stock, plain"]
        size = f"{saves['bytes'] / _GIB:g} GiB"
        lines += [
            "",
            f"Saving {size} of bf16 noise to a disk with fsync, 2 threads: `auto` takes {plain:.2f} × as long",
        ]
        lines += [f"as no compression, and {theirs:.2f} × as long as stock without."]
    replace_figures(page, _MODULE, lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure; print, or write JSON."""
    parser = argparse.ArgumentParser(prog="python -m integration_tests.benchmarks.compression", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="counted rounds; one more warms up (default: 9)")
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()), help="a folder on a disk")
    parser.add_argument("--save-gib", type=float, default=1.0, help="size of the saves; 0 leaves them out")
    parser.add_argument("--part", action="append", help="only parts whose name contains this")
    parser.add_argument("--json", type=Path, help="write figures here")
    parser.add_argument("--page", type=Path, help="write the table between the marks of this page")
    parser.add_argument("--from-json", type=Path, help="measure nothing: make the page of these figures")
    parser.add_argument("--weights", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.from_json:
        facts = json.loads(options.from_json.read_text())
        write_page(options.page, [Figure(**each) for each in facts["codecs"]], facts["saves"])
        return
    if not options.inside:
        _run_inside(sys.argv[1:] if arguments is None else arguments)
        return
    torch.set_num_threads(1)
    _register_plugins()
    data = parts(options.weights)
    if options.part:
        data = {name: each for name, each in data.items() if any(part in name for part in options.part)}
    figures = compare_codecs(data, options.rounds, list(CODECS))
    print(f"{'':30}{'':14}{'size':>8}{'encode':>8}{'decode':>8}   GB/s;  ÷ stock's zstd: encode, decode")
    for each in figures:
        print(
            f"{each.part:30}{each.codec:14}{each.size:8.4f}{each.encode_gb_per_second:8.2f}"
            f"{each.decode_gb_per_second:8.2f}{each.encode_speed:12.2f}{each.decode_speed:8.2f}"
        )
    saves = None
    if options.save_gib:
        with tempfile.TemporaryDirectory(dir=options.disk) as folder:
            saves = compare_saves(Path(folder), int(options.save_gib * _GIB), options.rounds)
        print(json.dumps(saves, indent=2, ensure_ascii=False))
    if options.page:
        write_page(options.page, figures, saves)
    if options.json:
        options.json.write_text(json.dumps({"codecs": [asdict(each) for each in figures], "saves": saves}, indent=1))


def _register_plugins() -> None:
    """The packages are used from their source folders: no entry point names their plugins."""
    from dcp_core import plugins

    for name in ("dcp_fs", "dcp_transforms"):
        plugins.register(importlib.import_module(f"{name}.plugin"), name=name)


def _run_inside(arguments: Sequence[str]) -> None:
    """This command in the environment that has zipnn, over the packages as they lie here."""
    from integration_tests.demo.weights import weights_file

    path = [*map(str, sorted(ROOT.glob("packages/*/src"))), str(ROOT)]
    subprocess.run(
        [python_of("zipnn"), "-m", __spec__.name, "--inside", "--weights", str(weights_file()), *arguments],
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"},
    )


if __name__ == "__main__":
    main()
