"""Items that go through transforms of streams: both ways with stock, chains, transforms of third parties, bad input."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import IO, Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint import _extension as stock_extension

import dcp_all as dcp
from dcp_base.hookspecs import hookimpl
from dcp_core.transforms import ExtensionRegistry, StreamTransformExtension
from dcp_manifest.errors import UnsupportedFormatError
from dcp_transforms import ZStandard
from integration_tests.kits.damage import flip

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")


class _Shifting(io.RawIOBase):
    def __init__(self, inner: IO[bytes], by: int) -> None:
        self._inner = inner
        self._by = by

    def _shift(self, data: Any, by: int) -> bytes:
        return bytes((byte + by) % 256 for byte in bytes(data))

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._inner.write(self._shift(data, self._by))
        return len(data)

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        return self._shift(self._inner.read(size), -self._by)

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._inner.close()
        super().close()


class Shift(StreamTransformExtension):
    """An encryption that nobody should use, as a third party would write one."""

    @staticmethod
    def registry_name() -> str:
        return "stream.shift"

    @staticmethod
    def from_descriptor(version: str) -> Shift:
        if version != "1":
            raise ValueError(f"no version {version}")
        return Shift()

    def get_descriptor(self) -> str:
        return "stream.shift/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        return _Shifting(output, 7)  # type: ignore[return-value]

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:  # noqa: A002
        return _Shifting(input, 7)  # type: ignore[return-value]


class StockShift(Shift, stock_extension.StreamTransformExtension):
    """The same for stock, which checks the class."""


class ShiftPlugin:
    @hookimpl
    def dcp_register_transforms(self) -> dict[str, str]:
        return {"stream.shift": f"{Shift.__module__}:Shift"}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The third party's package."""
    monkeypatch.setitem(sys.modules, Shift.__module__, sys.modules.get(Shift.__module__) or _as_module())
    dcp.plugins.register(ShiftPlugin(), name="shift")
    yield
    dcp.plugins.unregister("shift")


def _as_module() -> Any:
    module = type(sys)(Shift.__module__)
    module.Shift = Shift  # type: ignore[attr-defined]
    return module


def state() -> dict[str, Any]:
    maker = torch.Generator().manual_seed(1)
    return {
        "weight": torch.randn(300, 40, generator=maker).to(torch.bfloat16),
        "column": torch.randn(50, 60, generator=maker)[:, 3],
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 3),
        "zeros": torch.zeros(400_000),
        "nested": {"number": 5, "text": "words", "list": [1, 2]},
    }


def zeroed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: zeroed(each) for key, each in value.items()}
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else type(value)()


def holds(library: Any, folder: Path, **options: Any) -> bool:
    template, expected = zeroed(state()), state()
    library.load(template, storage_reader=library.FileSystemReader(folder, **options), no_dist=True)
    return all(
        torch.equal(template[key], value) if isinstance(value, torch.Tensor) else template[key] == value
        for key, value in expected.items()
    )


def save(folder: Path, extensions: list[Any], **options: Any) -> None:
    dcp.save(state(), storage_writer=dcp.FileSystemWriter(folder, _extensions=extensions, **options))


@pytest.mark.parametrize("layout", ["torch", "raw"])
@pytest.mark.parametrize("single_file", [True, False])
@pytest.mark.parametrize(
    "extension", [ZStandard(), ZStandard(-5, threads=2, checksum=False), stock_extension.ZStandard()]
)
def test_zstd_both_ways_with_stock(tmp_path: Path, layout: str, single_file: bool, extension: Any) -> None:
    save(tmp_path / "ours", [extension], layout=layout, single_file_per_rank=single_file)
    assert holds(dcp, tmp_path / "ours")
    assert holds(dcp, tmp_path / "ours", verify="before")
    assert dcp.verify_checkpoint(tmp_path / "ours").problems == ()
    if layout == "torch":
        assert holds(stock, tmp_path / "ours")
    assert sum(path.stat().st_size for path in (tmp_path / "ours").iterdir()) < 300_000
    stock.save(
        state(), storage_writer=stock.FileSystemWriter(tmp_path / "stock", _extensions=[extension]), no_dist=True
    )
    assert holds(dcp, tmp_path / "stock")


@pytest.mark.parametrize("order", [[0, 1], [1, 0], [1, 0, 1]])
def test_chains_are_undone_in_the_right_order(tmp_path: Path, installed: None, order: list[int]) -> None:
    """Entry C10: stock stores the descriptors in the wrong order, and cannot read its own chains."""
    ours = [[ZStandard(), Shift()][which] for which in order]
    theirs = [[stock_extension.ZStandard(), StockShift()][which] for which in order]
    registry = stock_extension.ExtensionRegistry()
    registry.register(StockShift)
    save(tmp_path / "ours", ours)
    assert holds(dcp, tmp_path / "ours")
    writer = stock.FileSystemWriter(tmp_path / "stock", _extensions=theirs)
    stock.save(state(), storage_writer=writer, no_dist=True)
    assert holds(dcp, tmp_path / "stock")
    if order == [0, 1]:
        with pytest.raises(stock.CheckpointException):
            holds(stock, tmp_path / "stock", _extension_registry=registry)


def test_a_registry_comes_before_what_is_installed(tmp_path: Path) -> None:
    save(tmp_path, [Shift()])
    with pytest.raises(dcp.DcpError, match=r"'stream.shift'"):
        holds(dcp, tmp_path)
    registry = ExtensionRegistry()
    registry.register(Shift)
    assert holds(dcp, tmp_path, _extension_registry=registry)


class Newer(Shift):
    def get_descriptor(self) -> str:
        return "stream.shift/2"


def test_unknown_versions_are_named(tmp_path: Path, installed: None) -> None:
    save(tmp_path, [Newer()])
    with pytest.raises(UnsupportedFormatError, match=r"'stream.shift/2'.*no version 2"):
        holds(dcp, tmp_path)


def test_slices_of_encoded_tensors(tmp_path: Path, ranks: Any) -> None:
    save(tmp_path, [ZStandard()])
    for rank, rows in enumerate(ranks.run(2, load_rows, str(tmp_path))):
        assert torch.equal(rows, state()["weight"][rank * 150 : rank * 150 + 150])


def load_rows(folder: str) -> torch.Tensor:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    local = torch.zeros(150, 40, dtype=torch.bfloat16)
    weight = DTensor.from_local(local, init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False)
    dcp.load({"weight": weight}, checkpoint_id=folder, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    return local


class Bomb(ZStandard):
    """Writes much more than went in."""

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        inner = super().transform_to(output)
        inner.write(bytes(64 << 20))
        return inner


class Cut(ZStandard):
    """Loses the end."""

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        class Short(io.BytesIO):
            def close(self) -> None:
                whole = io.BytesIO()
                with ZStandard().transform_to(whole) as stream:
                    stream.write(self.getvalue())
                output.write(whole.getvalue()[:-20])

        return Short()


@pytest.mark.parametrize("layout", ["torch", "raw"])
@pytest.mark.parametrize(("extension", "words"), [(Bomb(), "decodes to more than"), (Cut(), "weight")])
def test_what_decodes_to_something_else_is_refused(tmp_path: Path, layout: str, extension: Any, words: str) -> None:
    folder = tmp_path / "checkpoint"
    writer = dcp.FileSystemWriter(folder, _extensions=[extension], layout=layout)
    dcp.save({"weight": torch.ones(1000)}, storage_writer=writer)
    template = {"weight": torch.zeros(1000)}
    with pytest.raises(dcp.CorruptCheckpointError, match=words):
        dcp.load(template, checkpoint_id=folder)


@pytest.mark.parametrize("at", [0.1, 0.5, 0.9])
def test_flipped_bits_are_refused_before_they_are_decoded(tmp_path: Path, at: float) -> None:
    save(tmp_path, [ZStandard()], thread_count=1)
    (path,) = tmp_path.glob("*.distcp")
    flip(path, int(path.stat().st_size * at), 4)
    with pytest.raises(dcp.CorruptCheckpointError, match="differ from what was written"):
        holds(dcp, tmp_path)


class Failing(ZStandard):
    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        raise OSError("no encoder today")


def test_an_encoder_that_fails_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, [ZStandard()])
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(OSError, match="no encoder today"):
        save(tmp_path, [Failing()])
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert holds(dcp, tmp_path)


def test_large_results_do_not_stay_in_memory(tmp_path: Path) -> None:
    noise = torch.randint(0, 256, (8 << 20,), dtype=torch.uint8)
    writer = dcp.FileSystemWriter(tmp_path, _extensions=[ZStandard()], max_inflight_bytes=1 << 20)
    dcp.save({"noise": noise}, storage_writer=writer)
    template = {"noise": torch.zeros_like(noise)}
    dcp.load(template, checkpoint_id=tmp_path)
    assert torch.equal(template["noise"], noise)
