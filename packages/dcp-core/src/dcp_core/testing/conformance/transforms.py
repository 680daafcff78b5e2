"""Conformance suites for stream and block transforms: round trips, descriptors, damaged input."""

from __future__ import annotations

import contextlib
import io
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dcp_core.encoding.compression import (
    BlockChain,
    BlockTransformExtension,
    BlockUndo,
    Extension,
    ExtensionRegistry,
    StreamTransformExtension,
    block_bytes,
)

__all__ = ["BlockTransformConformance", "StreamTransformConformance"]

_RANDOM = np.random.default_rng(7)
PAYLOADS = {
    "nothing": b"",
    "one element": bytes(range(16)),
    "noise": _RANDOM.bytes(48_000),
    "zeros": bytes(48_000),
    "weights": _RANDOM.normal(0, 0.02, 12_000).astype("<f4").tobytes(),
    "counts": np.arange(6_000, dtype="<i8").tobytes(),
    "special floats": np.array([0x7F800001, 0x80000000, 0xFFC00000, 1, 0xFFFFFFFF], "<u4").repeat(400).tobytes(),
}
DTYPES = ("uint8", "bool", "bfloat16", "float16", "float32", "float64", "int64", "complex128", "of_a_later_torch")


class _ExtensionTests:
    def make(self) -> Extension:
        raise NotImplementedError

    def test_its_descriptor_finds_it(self) -> None:
        transform = self.make()
        name, found, version = transform.get_descriptor().partition("/")
        assert (name, bool(found), bool(version)) == (transform.registry_name(), True, True)
        registry = ExtensionRegistry()
        registry.register(type(transform))
        (again,) = registry.from_descriptor_list([transform.get_descriptor()])
        assert isinstance(again, type(transform))

    def test_versions_to_come_are_refused(self) -> None:
        with pytest.raises(ValueError, match="987654"):
            type(self.make()).from_descriptor("987654")


class StreamTransformConformance(_ExtensionTests):
    """Suite of a stream transform: derive a class that overrides `make`."""

    def make(self) -> StreamTransformExtension:
        """Return the transform under test. To be overridden."""
        raise NotImplementedError

    def _encoded(self, data: bytes, step: int) -> bytes:
        output = io.BytesIO()
        stream = self.make().transform_to(output)
        for start in range(0, len(data), step):
            stream.write(memoryview(data)[start : start + step])
        stream.close()
        assert not output.closed, "closing the stream must leave the file open"
        return output.getvalue()

    def _decoded(self, data: bytes, step: int) -> bytes:
        reader = type(self.make()).from_descriptor(self.make().get_descriptor().partition("/")[2])
        stream = reader.transform_from(io.BytesIO(data))  # type: ignore[attr-defined]
        return b"".join(iter(lambda: bytes(stream.read(step)), b""))

    @pytest.mark.parametrize("payload", PAYLOADS)
    @pytest.mark.parametrize("steps", [(7_001, 1 << 20), (1 << 20, 997)])
    def test_what_goes_in_comes_out(self, payload: str, steps: tuple[int, int]) -> None:
        data = PAYLOADS[payload]
        assert self._decoded(self._encoded(data, steps[0]), steps[1]) == data

    def test_streams_of_several_threads_do_not_meet(self) -> None:
        with ThreadPoolExecutor(4) as pool:
            results = pool.map(lambda data: self._decoded(self._encoded(data, 999), 1001), [*PAYLOADS.values()] * 4)
        assert list(results) == [*PAYLOADS.values()] * 4


class BlockTransformConformance(_ExtensionTests):
    """Suite of a block transform: derive a class that overrides `make`."""

    def make(self) -> BlockTransformExtension:
        """Return the transform under test. To be overridden."""
        raise NotImplementedError

    def _reader(self) -> BlockUndo:
        transform = self.make()
        version = transform.get_descriptor().partition("/")[2]
        reader = type(transform).from_descriptor(version)
        assert isinstance(reader, BlockTransformExtension)
        return BlockUndo([reader])

    @pytest.mark.parametrize("payload", PAYLOADS)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_every_block_comes_back(self, payload: str, dtype: str) -> None:
        data = PAYLOADS[payload]
        suited = self.make().for_item(memoryview(data[:4096]), dtype)[0] if data else self.make()
        for transform in (self.make(), suited):
            chain = BlockChain([transform], dtype, block_bytes(len(data)))
            assert chain.descriptors == (self.make().get_descriptor(),), "for_item must not change the descriptor"
            encoded = bytes(chain.encode(memoryview(data)))
            into = bytearray(len(data))
            self._reader().decode(memoryview(encoded), memoryview(into))
            assert into == data

    def test_a_block_says_how_long_it_becomes(self) -> None:
        for data in PAYLOADS.values():
            encoded = bytes(self.make().encode_block(memoryview(data), "uint8"))
            assert self.make().decoded_bytes(memoryview(encoded)) == len(data)
            with pytest.raises(ValueError, match="it declares"):
                self._reader().decode(memoryview(encoded), memoryview(bytearray(len(data) + 16)))

    @pytest.mark.parametrize("payload", ["weights", "zeros"])
    def test_damage_stays_within_the_memory_that_was_given(self, payload: str) -> None:
        data = PAYLOADS[payload]
        encoded = bytes(self.make().encode_block(memoryview(data), "float32"))
        for place in range(0, len(encoded), max(1, len(encoded) // 60)):
            for damaged in (encoded[:place], encoded[:place] + bytes([encoded[place] ^ 64]) + encoded[place + 1 :]):
                around = bytearray(b"\x5a" * (len(data) + 32))
                with contextlib.suppress(Exception):  # any result will do: the CRC is checked before decoding
                    self._reader().decode(memoryview(damaged), memoryview(around)[16:-16])
                assert around[:16] == around[-16:] == b"\x5a" * 16

    def test_blocks_of_several_threads_do_not_meet(self) -> None:
        transform, reader = self.make(), self._reader()

        def round_trip(data: bytes) -> bytes:
            encoded = bytes(transform.encode_block(memoryview(data), "float32"))
            into = bytearray(len(data))
            reader.decode(memoryview(encoded), memoryview(into))
            return bytes(into)

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(round_trip, [*PAYLOADS.values()] * 6)) == [*PAYLOADS.values()] * 6
