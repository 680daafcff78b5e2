"""Which items go through which transforms, with transforms of this file's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dcp_core import plugins
from dcp_core.encoding.compression import (
    BlockTransformExtension,
    CompressedRequest,
    CompressionPolicy,
    StreamTransformExtension,
)
from dcp_core.errors import UnsupportedFormatError
from dcp_core.storage.storage_writer import tensor_payload
from dcp_io.requests import Payload, WriteRequest
from dcp_manifest.index.columns import Framing


class Half(BlockTransformExtension):
    """Keeps a share of the bytes: of no use for reading."""

    share = 0.5
    name = "block.half"

    @classmethod
    def registry_name(cls) -> str:  # type: ignore[override]
        return cls.name

    @classmethod
    def from_descriptor(cls, version: str) -> Half:  # type: ignore[override]
        return cls()

    def get_descriptor(self) -> str:
        return f"{self.name}/1"

    def for_item(self, sample: memoryview, dtype: str) -> tuple[BlockTransformExtension, float]:
        self.sampled = len(sample), dtype
        return super().for_item(sample, dtype)

    def encode_block(self, block: memoryview, dtype: str) -> memoryview:
        return block[: int(len(block) * self.share)]

    def decoded_bytes(self, data: memoryview) -> int:
        raise AssertionError

    def decode_block(self, data: memoryview, into: memoryview) -> None:
        raise AssertionError


class Third(Half):
    share = 1 / 3
    name = "block.third"


class Little(Half):
    share = 0.98
    name = "block.little"


class Keyed(Half):
    """A transform without default settings."""

    name = "block.keyed"

    def __init__(self, key: str) -> None:
        self.key = key


class Stream(StreamTransformExtension):
    registry_name = from_descriptor = None  # type: ignore[assignment]

    def get_descriptor(self) -> str:
        return "stream.test/1"

    def transform_to(self, output: Any) -> Any:
        return output

    def transform_from(self, input: Any) -> Any:  # noqa: A002
        return input


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transforms of these names, whether or not a package is installed that has others."""
    found = {"block.planes": Half, "block.zstd": Third, "block.keyed": Keyed}
    monkeypatch.setattr(plugins, "transform", lambda descriptor: found[descriptor.partition("/")[0]])


def payload(count: int = 100_000, dtype: torch.dtype = torch.float32) -> Payload:
    return tensor_payload("t", torch.zeros(count, dtype=dtype))


def chain_of(setting: Any, key: str = "t", given: Payload | None = None) -> tuple[str, ...]:
    """Descriptors of what an item goes through."""
    found = CompressionPolicy(setting).apply(key, given or payload())
    return found.blocks.descriptors if found.blocks else tuple(each.get_descriptor() for each in found.encoders)


def test_transforms_and_lists_of_them() -> None:
    assert chain_of(None) == chain_of("none") == ()
    assert chain_of(Half()) == ("block.half/1",)
    assert chain_of([Half(), Third()]) == ("block.half/1", "block.third/1")
    assert chain_of(Stream()) == ("stream.test/1",)
    assert chain_of([Stream(), Stream()]) == ("stream.test/1",) * 2
    assert CompressionPolicy(None).changes_nothing
    assert CompressionPolicy({"a": "none"}).changes_nothing
    assert not CompressionPolicy({"a": Half()}).changes_nothing


def test_what_does_not_shrink_is_stored_plain() -> None:
    assert chain_of(Little()) == ()
    assert chain_of([Little(), Half()]) == ("block.little/1", "block.half/1")


def test_blocks_are_for_tensors_of_some_size() -> None:
    assert chain_of(Half(), given=payload(1023)) == ()
    assert chain_of(Half(), given=payload(1024)) == ("block.half/1",)
    assert chain_of(Half(), given=Payload(bytes(99999), Framing.OBJECT)) == ()
    assert chain_of(Stream(), given=Payload(bytes(9), Framing.OBJECT)) == ("stream.test/1",)


@pytest.mark.parametrize(("count", "sampled"), [(2000, 8000), (2100, 8192), (100_000, 12288), (10_000_000, 131072)])
def test_samples(count: int, sampled: int) -> None:
    transform = Half()
    CompressionPolicy(transform).apply("t", payload(count))
    assert transform.sampled == (sampled, "float32")


def test_a_sample_of_what_is_made_piece_by_piece() -> None:
    transform = Half()
    given = tensor_payload("t", torch.zeros(500, 500).t())
    assert chain_of(transform, given=given) == ("block.half/1",)
    assert 0 < transform.sampled[0] <= 1 << 17


def test_mappings_by_dtype_and_name() -> None:
    setting = {"skip.*": None, torch.bfloat16: Third(), "float32": Half(), "*.w": Stream()}
    assert chain_of(setting, "skip.a") == ()
    assert chain_of(setting, "a.w") == ("block.half/1",)
    assert chain_of(setting, "a.w", payload(dtype=torch.bfloat16)) == ("block.third/1",)
    assert chain_of(setting, "a.w", payload(dtype=torch.int8)) == ("stream.test/1",)
    assert chain_of(setting, "a.W", payload(dtype=torch.int8)) == ()


@pytest.mark.usefixtures("installed")
def test_names() -> None:
    assert chain_of("auto", given=payload(dtype=torch.int32)) == ("block.third/1",)
    assert chain_of("auto") == chain_of("auto", given=payload(dtype=torch.bfloat16)) == ("block.half/1",)
    assert chain_of("planes") == ("block.half/1",)
    assert chain_of("block.zstd/1") == ("block.third/1",)
    assert chain_of(["block.zstd/1", Half()]) == ("block.third/1", "block.half/1")


@pytest.mark.usefixtures("installed")
def test_a_transform_is_named_with_or_without_its_version() -> None:
    assert chain_of("block.zstd") == chain_of("block.zstd/1") == ("block.third/1",)
    assert chain_of(["block.zstd", "block.planes/1"]) == ("block.third/1", "block.half/1")
    assert chain_of({"t": "block.planes"}) == ("block.half/1",)
    with pytest.raises(ValueError, match=r"'block\.keyed' needs settings: write block\.keyed/VERSION"):
        chain_of("block.keyed")


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("fast", "'fast' is not known: choose auto"),
        (7, "7 is not a transform"),
        ([Half(), Stream()], "mixes"),
        ({3: "none"}, "has the key 3"),
        ({"a": {"b": "none"}}, "not a transform"),
    ],
)
def test_settings_that_mean_nothing(setting: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        CompressionPolicy(setting)


def test_a_package_that_is_missing_is_named() -> None:
    with pytest.raises(UnsupportedFormatError, match="install"):
        CompressionPolicy("stream.nobody/1")


def test_a_request_asks_when_its_turn_has_come() -> None:
    asked = []

    def resolve() -> Payload:
        asked.append(1)
        return payload()

    request = CompressedRequest(WriteRequest("t", 9, resolve), CompressionPolicy(Half()))
    assert (request.key, request.cost_bytes, asked) == ("t", 9, [])
    assert request.resolve().blocks is not None
    assert asked == [1]
