"""Calls with generated arguments, in child processes: no signal, no address, little memory, little time.

`python -m integration_tests.fuzz.call_campaign 20000` tries so many; what breaks is printed with its seed.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime as dt
import decimal
import fractions
import io
import itertools
import os
import pathlib
import pickle
import random
import resource
import signal
import struct
import sys
import types
import uuid
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dcp_core.objects.object_bytes import load_object
from dcp_manifest.errors import CorruptCheckpointError, UnsafeCheckpointError
from integration_tests.fuzz.argument_trees import Node, changed, nodes, pickle_of_tree, tree_of

__all__ = ["Breach", "attempt", "attempt_calls", "forbidden", "made_of", "seeds"]

_SECONDS = 60
_MANY = 1 << 16
_MEMORY_BYTES = 1 << 30
_GROWTH_KIB = 400 << 10
_SLOTS = struct.Struct("<q")


@dataclass(frozen=True, slots=True)
class Breach:
    """A pickle that did what none may."""

    seed: int
    what: str


def _values() -> list[Any]:
    """At least one of every class and function of the allow-list."""
    tensor = torch.arange(12.0).reshape(3, 4)
    parameter = torch.nn.Parameter(torch.ones(2))
    vars(parameter)["partition_dim"] = 0
    attributed = torch.ones(2)
    vars(attributed)["note"] = "x"
    state = collections.OrderedDict(weight=tensor)
    vars(state)["_metadata"] = {"": {"version": 1}}
    return [
        [True, 1, 1 << 70, 1.5, 1j, "x", b"bytes", bytearray(b"x"), None, ...],
        [range(3), slice(1, 2), {1, (2, 3)}, frozenset({4, ("a",)}), {(1, 2): 3, 0.5: 1}],
        [collections.Counter("aab"), collections.deque([1, 2], 5), collections.defaultdict(list, {"a": [1]}), state],
        [
            dt.date(2024, 2, 29),
            dt.time(3, 4),
            dt.timedelta(3, 1),
            dt.datetime(2024, 1, 1, tzinfo=dt.timezone.utc),
        ],
        [decimal.Decimal("1.5"), fractions.Fraction(1, 3), uuid.UUID(int=7), pathlib.PurePosixPath("a/b")],
        [argparse.Namespace(lr=1), types.SimpleNamespace(a=[1]), io.BytesIO(b"stream"), io.StringIO("text")],
        [random.Random(1).getstate()[0], np.random.RandomState(1).get_state()[2:]],
        [
            np.arange(6).reshape(2, 3),
            np.asfortranarray(np.ones((2, 3), "f4")),
            np.array(["a", "bc"]),
            np.zeros((0, 3)),
        ],
        [
            np.array([1, "x", None], dtype=object),
            np.float32(2),
            np.datetime64("2024-01-02"),
            np.str_("abc"),
            np.bool_(1),
        ],
        [np.ones(2, [("a", "i4"), ("b", "f8", (2,))]), np.dtype([("a", ">i2"), ("c", "M8[25s]")]), np.dtype("V3")],
        [tensor, tensor.t(), tensor[1:], torch.ones(1).expand(5), torch.tensor([1j]).conj(), torch.zeros(0)],
        [parameter, attributed, torch.zeros(2, dtype=torch.float8_e4m3fn), torch.zeros(3, dtype=torch.uint16)],
        [
            torch.eye(2).to_sparse(),
            torch.eye(2).to_sparse_csr(),
            torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        ],
        [
            torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
            torch.ones(2, device="meta"),
            torch.Size([1, 2]),
        ],
        [torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.qint8)],
        [torch.device("cuda:3"), torch.strided, torch.float32, torch.torch_version.TorchVersion("2.13")],
    ]


def seeds() -> tuple[list[Node], dict[str, bytes]]:
    """Trees of the values, and the records of storages that they refer to."""
    trees, records = [], {}
    for number, (value, protocol) in enumerate(itertools.product(_values(), (2, 4))):
        buffer = io.BytesIO()
        torch.save(value, buffer, pickle_protocol=protocol)
        with zipfile.ZipFile(buffer) as archive:
            tree = tree_of(archive.read("archive/data.pkl"))
            for storage in (node for node in nodes(tree) if node.kind == "storage"):
                key = storage.parts[0].parts[2]
                if key.value.isdecimal():
                    records[f"archive/data/{key.value}-{number}"] = archive.read(f"archive/data/{key.value}")
                    key.value = f"{key.value}-{number}"
        trees.append(tree)
    return trees + forbidden(), records


def made_of() -> list[Any]:
    """The values that the first trees are of, in their order."""
    return [value for value in _values() for _ in range(2)]


def forbidden() -> list[Node]:
    """Calls of what is a value alone, as they would do harm."""

    def plain(value: Any) -> Node:
        if type(value) is tuple:
            return Node("tuple", None, [plain(each) for each in value])
        return value if isinstance(value, Node) else Node("value", value)

    def call(name: str, *arguments: Any) -> Node:
        return Node("call", None, [Node("name", name), plain(arguments)])

    pointers, numbers = call("numpy.dtype", "O"), call("numpy.dtype", "i8")
    objects = tree_of(pickle.dumps(np.array([dict, list, set]), 2))
    many = 1 << 28
    return [
        call("numpy.ndarray", (4,), pointers, b"A" * 32),
        call("numpy.ndarray", (3,), numbers, objects),
        call("numpy.ndarray", (9,), numbers),
        *(call(f"torch.{name}", many) for name in ("Tensor", "FloatTensor", "storage.UntypedStorage")),
        call("torch._utils._rebuild_device_tensor_from_cpu_tensor", call("torch.Tensor", many), None, "cpu", False),
        call(
            "torch._tensor._rebuild_from_type_v2",
            Node("name", "builtins.bytes"),
            Node("name", "builtins.bytes"),
            (many,),
            None,
        ),
    ]


def _archive(pickled: bytes, records: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/byteorder", "little")
        for name, data in records.items():
            file.writestr(name, data)
    return buffer.getvalue()


def _mapped() -> list[tuple[int, int]]:
    with open("/proc/self/maps", encoding="ascii") as file:
        ranges = [line.split()[0].split("-") for line in file]
    return [(int(start, 16), int(stop, 16)) for start, stop in ranges]


def _numbers(value: Any, depth: int = 0) -> Iterator[int]:
    """Use a value, and give the whole numbers in it."""
    if type(value) is int:
        yield value
    elif depth < 20:
        for part in _inside(value)[:99]:
            yield from _numbers(part, depth + 1)


def _inside(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return _elements(value)
    if isinstance(value, np.ndarray):
        return value.ravel().tolist() if value.size <= _MANY else []
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        return [*value]
    return [*vars(value).values()] if hasattr(value, "__dict__") and not isinstance(value, type) else []


def _elements(tensor: torch.Tensor) -> list[Any]:
    """All elements of a tensor are read; some are given."""
    if tensor.is_meta or tensor.numel() > _MANY:
        return []
    dense = tensor.to_padded_tensor(0) if tensor.is_nested else tensor.to_dense() if not tensor.is_quantized else tensor
    plain = dense.dequantize().detach().resolve_conj().resolve_neg().contiguous()
    plain.flatten().view(torch.uint8).sum()
    return plain.flatten()[:99].tolist()


def attempt(pickled: bytes, records: dict[str, bytes]) -> str | None:
    """What a load has done that none may; None if nothing."""
    try:
        value = load_object(_archive(pickled, records), key="k")
    except (CorruptCheckpointError, UnsafeCheckpointError) as error:
        text = f"{error} {error.__cause__!r}"
        return f"it asked for memory: {text}" if "MemoryError" in text or "allocate" in text else None
    numbers: list[int] = []
    # Whatever a class makes of values that cannot be used (a NaN as a scale) is no matter; that it ends is.
    with contextlib.suppress(Exception):
        numbers = [number for number in _numbers(value) if number >= 1 << 32]
    with contextlib.suppress(Exception):
        pickle.dumps(value)
    ranges = _mapped() if numbers else []
    for number in numbers:
        given = number.to_bytes(9 + number.bit_length() // 8, "little", signed=True)[:6] in pickled
        if not given and any(start <= number < stop for start, stop in ranges):
            return f"it gave away the address {number:#x}"
    return None


def attempt_calls(first: int, count: int) -> list[Breach]:
    """Try `count` pickles, from a seed on, each batch in a child process.

    Returns:
        Those that did what none may.
    """
    trees, records = seeds()
    breaches = []
    at = first
    while at < first + count:
        done, what = _in_child(at, first + count, trees, records)
        if what:
            breaches.append(Breach(done, what))
        at = done + 1
    return breaches


def _in_child(start: int, stop: int, trees: list[Node], records: dict[str, bytes]) -> tuple[int, str]:
    """Try seeds until one breaks something: the last seed that was tried, and what it did."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _run(start, stop, trees, records, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    whole = len(said) // _SLOTS.size if not said.endswith(b"!") else said.rindex(b"?") // _SLOTS.size
    last = _SLOTS.unpack_from(said, (whole - 1) * _SLOTS.size)[0] if whole else start
    if os.WIFSIGNALED(status):
        return last, f"ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return last, said[whole * _SLOTS.size + 1 : -1].decode() if said.endswith(b"!") else ""


def _run(start: int, stop: int, trees: list[Node], records: dict[str, bytes], pipe: int) -> None:
    """Write each seed before it is tried, and `?…!` with what it did."""
    code = 1
    try:
        warnings.simplefilter("ignore")
        with open("/proc/self/statm", encoding="ascii") as file:
            now = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (now + _MEMORY_BYTES, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        for seed in range(start, stop):
            os.write(pipe, _SLOTS.pack(seed))
            rng = random.Random(seed)
            pickled = pickle_of_tree(changed(rng.choice(trees), trees, rng))
            signal.alarm(_SECONDS)
            what = attempt(pickled, records)
            signal.alarm(0)
            if what is None and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before > _GROWTH_KIB:
                what = "it took much memory"
            if what is not None:
                os.write(pipe, b"?" + what.encode("utf-8", "replace") + b"!")
                break
        code = 0
    except BaseException as error:
        os.write(pipe, b"?" + repr(error).encode("utf-8", "replace") + b"!")
        raise
    finally:
        os._exit(code)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    total = int(sys.argv[1])
    for found in attempt_calls(int(sys.argv[2]) if len(sys.argv) > 2 else 0, total):
        print(found)
    print(f"{total:,} pickles tried")
