"""Any format into any other, with changes on the way; what cannot be done is said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dcp_core import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsupportedFormatError,
    hookimpl,
    load_keys,
    plugins,
    save,
)
from dcp_core.errors import MissingKeyError, UnsupportedValueError
from dcp_core.testing.trees import same
from dcp_format import Content, Conversion, TensorEntry, WriteOptions, convert
from dcp_format.content.changes import select_values
from dcp_format.conversion import open_content
from dcp_format.converters import converter_for, detect
from dcp_format.safetensors.safetensors_index import INDEX_NAME
from dcp_io import CheckpointExistsError
from integration_tests.kits.damage import flip


def source(path: Path) -> dict[str, torch.Tensor]:
    weight = torch.randn(300, 20)
    value = {"a": weight, "b": torch.arange(12).view(3, 4), "tied": weight, "c": torch.randn(3, dtype=torch.bfloat16)}
    save(value, checkpoint_id=path)
    return value


NAMES = {"checkpoint": "ckpt", "torch": "model.pt", "safetensors": "model.safetensors"}


@pytest.mark.parametrize("first", NAMES)
@pytest.mark.parametrize("second", NAMES)
def test_any_into_any(tmp_path: Path, first: str, second: str) -> None:
    value = source(tmp_path / "source")
    one, two = tmp_path / NAMES[first], tmp_path / f"second-{NAMES[second]}"
    assert convert(tmp_path / "source", one).format == first
    assert detect(one) == first
    assert convert(one, two).format == second
    convert(two, tmp_path / "end")
    assert same(load_keys(checkpoint_id=tmp_path / "end"), value)
    from dcp_manifest import index_of

    assert index_of(tmp_path / "end").alias_names == ["tied"]


def test_folder_of_shards(tmp_path: Path) -> None:
    value = source(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "out.hf", options=WriteOptions(max_file_bytes=24_100))
    weight_map = json.loads((tmp_path / "out.hf" / INDEX_NAME).read_text())["weight_map"]
    assert weight_map.keys() == value.keys()
    files = sorted(set(weight_map.values()))
    assert files == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    loaded: dict[str, Any] = {}
    for file in files:
        loaded |= load_file(tmp_path / "out.hf" / file)
    assert same(loaded, value)
    assert len(files) == 2


def test_names_dtype_and_choice(tmp_path: Path) -> None:
    value = source(tmp_path / "source")
    convert(
        tmp_path / "source",
        tmp_path / "out.safetensors",
        include=["a", "b"],
        rename={"a": "model.a"},
        rename_regex=[(r"^b$", "model.b")],
        dtype=torch.float16,
    )
    loaded = load_file(tmp_path / "out.safetensors")
    assert same(loaded, {"model.a": value["a"].half(), "model.b": value["b"]})


def test_a_conversion_reports_what_it_wrote(tmp_path: Path) -> None:
    save({"model": {"w": torch.ones(3), "v": torch.ones(5)}, "step": 7}, checkpoint_id=tmp_path / "c")
    done = convert(tmp_path / "c", tmp_path / "out.pt", exclude=["model.v"], dtype=torch.float64)
    assert done == Conversion(str(tmp_path / "c"), str(tmp_path / "out.pt"), "torch", 1, 1, 24)
    assert repr(done) == f"<Conversion: {tmp_path / 'out.pt'}: 1 tensor, 24 B, torch>"
    assert repr(replace(done, tensors=1200, destination="a\nb")).startswith(r"<Conversion: a\nb: 1,200 tensors, ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"include": ["model"]}, r"include='model' matches no value in .*; did you mean 'model\.\*', for all values"),
        ({"include": ["model.ww*"]}, r"include='model.ww\*' matches no value in .*; did you mean 'model.w"),
        ({"include": ["xyz"]}, r"include='xyz' matches no value in [^;]*; `dcp show` lists the names"),
        ({"exclude": ["*"]}, "exclude leaves nothing of the 3 values in"),
    ],
)
def test_nothing_to_convert(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    save({"model": {"w": torch.ones(3), "v": torch.ones(5)}, "step": 7}, checkpoint_id=tmp_path / "c")
    with pytest.raises(MissingKeyError, match=message):
        convert(tmp_path / "c", tmp_path / "out.pt", **options)
    assert not (tmp_path / "out.pt").exists()


def test_a_tied_name_outlives_its_tensor(tmp_path: Path) -> None:
    value = source(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "out.safetensors", exclude=["a"])
    assert torch.equal(load_file(tmp_path / "out.safetensors")["tied"], value["a"])


def test_other_names_stay_tied_without_the_first(tmp_path: Path) -> None:
    weight = torch.arange(3.0)
    torch.save(dict.fromkeys("TABC", weight), tmp_path / "a.pt")
    chosen = select_values(open_content(tmp_path / "a.pt"), exclude=["T"])
    assert list(chosen.tensors) == ["A"]
    assert chosen.aliases == {"B": "A", "C": "A"}


def test_the_name_of_the_metadata_is_refused(tmp_path: Path) -> None:
    torch.save({"__metadata__": torch.ones(2), "w": torch.ones(2)}, tmp_path / "a.pt")
    for name in ("a.safetensors", "a.hf"):
        with pytest.raises(UnsupportedValueError, match="named '__metadata__'"):
            convert(tmp_path / "a.pt", tmp_path / name)
        assert not [*tmp_path.glob("*.safetensors"), *tmp_path.glob("*.hf/*")]
    convert(tmp_path / "a.pt", tmp_path / "b.safetensors", rename={"__metadata__": "m"})
    assert load_file(tmp_path / "b.safetensors").keys() == {"m", "w"}


def test_objects(tmp_path: Path) -> None:
    save({"w": torch.ones(3), "step": 7}, checkpoint_id=tmp_path / "c")
    remedies = r"objects='sidecar'.*objects='skip'.*include=\['model"
    with pytest.raises(UnsupportedValueError, match=f"tensors only; 'step' is not a tensor: .*{remedies}"):
        convert(tmp_path / "c", tmp_path / "x.safetensors")
    assert not (tmp_path / "x.safetensors").exists()
    convert(tmp_path / "c", tmp_path / "x.safetensors", options=WriteOptions(objects="sidecar"))
    assert torch.load(tmp_path / "x.objects.pt", weights_only=True) == {"step": 7}
    convert(tmp_path / "c", tmp_path / "x.hf", options=WriteOptions(objects="sidecar"))
    assert torch.load(tmp_path / "x.hf" / "objects.pt", weights_only=True) == {"step": 7}
    convert(tmp_path / "c", tmp_path / "y.safetensors", options=WriteOptions(objects="skip"))
    assert [*load_file(tmp_path / "y.safetensors")] == ["w"]


@pytest.mark.parametrize(("name", "objects"), [("x.safetensors", "x.objects.pt"), ("x.hf", "x.hf/objects.pt")])
def test_objects_in_sidecars_of_others_stay(tmp_path: Path, name: str, objects: str) -> None:
    """Neither the objects of another file are touched, nor tensors replaced whose objects cannot be written."""
    for number in (1, 2):
        save({"w": torch.full((3,), float(number)), "step": number}, checkpoint_id=tmp_path / str(number))
    convert(tmp_path / "1", tmp_path / "other.safetensors", options=WriteOptions(objects="sidecar"))
    (tmp_path / objects).parent.mkdir(exist_ok=True)
    (tmp_path / objects).write_text("of somebody else")
    with pytest.raises(CheckpointExistsError, match=r"objects\.pt exists already"):
        convert(tmp_path / "2", tmp_path / name, options=WriteOptions(objects="sidecar"))
    assert not [*tmp_path.glob("x*/*.safetensors"), *tmp_path.glob("x.safetensors")]
    convert(tmp_path / "2", tmp_path / name, options=WriteOptions(objects="sidecar", overwrite=True))
    assert torch.load(tmp_path / objects, weights_only=True) == {"step": 2}
    assert torch.load(tmp_path / "other.objects.pt", weights_only=True) == {"step": 1}


def test_tensors_and_their_objects_are_replaced_together_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2):
        save({"w": torch.full((3,), float(number)), "step": number}, checkpoint_id=tmp_path / str(number))
    convert(tmp_path / "1", tmp_path / "x.safetensors", options=WriteOptions(objects="sidecar"))
    options = WriteOptions(objects="sidecar", overwrite=True)

    def fail(*arguments: Any, **more: Any) -> Any:
        raise ZeroDivisionError

    for what in ("load_object", "write_tensor_file"):
        with monkeypatch.context() as patch:
            patch.setattr(f"dcp_format.safetensors.safetensors_write.{what}", fail)
            with pytest.raises(ZeroDivisionError):
                convert(tmp_path / "2", tmp_path / "x.safetensors", options=options)
        assert load_file(tmp_path / "x.safetensors")["w"].tolist() == [1, 1, 1]
        assert torch.load(tmp_path / "x.objects.pt", weights_only=True) == {"step": 1}


@pytest.mark.parametrize("compression", ["zstd", "planes", "auto"])
def test_compressed_checkpoints(tmp_path: Path, compression: str) -> None:
    pytest.importorskip("dcp_transforms")
    value = {
        "large": torch.randn(700, 1000).to(torch.bfloat16) * 0.02,
        "small": torch.arange(5),
        "zeros": torch.zeros(9000),
    }
    save(value, checkpoint_id=tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "less", options=WriteOptions(compression=compression))
    sizes = [sum(each.stat().st_size for each in (tmp_path / name).glob("*.distcp")) for name in ("source", "less")]
    assert sizes[1] < 0.9 * sizes[0]
    convert(tmp_path / "less", tmp_path / "plain.safetensors")
    assert same(load_file(tmp_path / "plain.safetensors"), value)
    (data,) = (tmp_path / "less").glob("*.distcp")
    flip(data)
    with pytest.raises(CorruptCheckpointError):
        convert(tmp_path / "less", tmp_path / "damaged.safetensors")


def test_what_cannot_be_done_is_said(tmp_path: Path) -> None:
    source(tmp_path / "c")
    with pytest.raises(CheckpointNotFoundError, match="check the path"):
        convert(tmp_path / "nothing", tmp_path / "x.pt")
    (tmp_path / "text").write_text("hello, this is a text")
    with pytest.raises(UnsupportedFormatError, match="of no known format"):
        convert(tmp_path / "text", tmp_path / "x.pt")
    with pytest.raises(UnsupportedFormatError, match="itself"):
        convert(tmp_path / "c", tmp_path / "c")
    with pytest.raises(MissingKeyError, match="'zz"):
        convert(tmp_path / "c", tmp_path / "x.pt", include=["zz*"])
    with pytest.raises(MissingKeyError, match="'zz'"):
        convert(tmp_path / "c", tmp_path / "x.pt", rename={"zz": "y"})
    with pytest.raises(UnsupportedValueError, match="both be named"):
        convert(tmp_path / "c", tmp_path / "x.pt", rename={"a": "b"})
    convert(tmp_path / "c", tmp_path / "x.pt")
    with pytest.raises(CheckpointExistsError, match="exists already"):
        convert(tmp_path / "c", tmp_path / "x.pt")


class Lines:
    """A format of a third party: one line of numbers per tensor."""

    def detect(self, path: Any) -> bool:
        return str(path).endswith(".lines")

    def suits(self, path: Any) -> bool:
        return str(path).endswith(".lines")

    def read(self, path: Any) -> Content:
        tensors = {}
        for line in Path(path).read_text().splitlines():
            name, *numbers = line.split()
            tensors[name] = TensorEntry(name, "float32", (len(numbers),), Bytes([float(each) for each in numbers]))
        return Content(str(path), tensors)

    def write(self, content: Content, path: Any, options: WriteOptions) -> None:
        lines = []
        for name, entry in content.tensors.items():
            values = torch.frombuffer(b"".join(entry.data.pieces(1 << 20)), dtype=torch.float32)
            lines.append(" ".join([name, *map(str, values.tolist())]))
        Path(path).write_text("\n".join(lines))


class Bytes:
    def __init__(self, numbers: list[float]) -> None:
        self._data = torch.tensor(numbers).numpy().tobytes()
        self.nbytes = len(self._data)

    def pieces(self, max_bytes: int) -> Any:
        yield memoryview(self._data)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_a_converter_of_a_third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    import types

    module = types.ModuleType("lines_format")
    module.Lines = Lines  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lines_format", module)

    class Plugin:
        @hookimpl
        def dcp_register_converters(self) -> dict[str, str]:
            return {"lines": "lines_format:Lines"}

    plugins.register(Plugin(), name="lines")
    try:
        (tmp_path / "in.lines").write_text("w 1.0 2.5\nv 3.0")
        assert detect(tmp_path / "in.lines") == "lines"
        convert(tmp_path / "in.lines", tmp_path / "c", format="checkpoint")
        assert load_keys(checkpoint_id=tmp_path / "c")["w"].tolist() == [1.0, 2.5]
        convert(tmp_path / "c", tmp_path / "out.lines", format="lines")
        assert (tmp_path / "out.lines").read_text() == "w 1.0 2.5\nv 3.0"
    finally:
        plugins.unregister("lines")


def test_a_converter_that_fails_to_look_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: Any, path: Any) -> bool:
        raise ZeroDivisionError("in a detector")

    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "other").write_bytes(b"?")
    monkeypatch.setattr(type(converter_for("checkpoint")), "detect", fail)
    assert detect(tmp_path / "model.safetensors") == "safetensors"
    assert "'checkpoint' could not look at" in caplog.text
    with pytest.raises(UnsupportedFormatError, match="no known format") as caught:
        detect(tmp_path / "other")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
