from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcp_base import descriptors as vectors
from dcp_base.descriptors import read_fully, write_fully


@pytest.fixture
def fd(tmp_path):
    fd = os.open(tmp_path / "x", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    pieces=st.lists(st.binary(max_size=20), max_size=12),
    call_limit=st.integers(1, 30),
    piece_limit=st.integers(1, 4),
    short=st.lists(st.integers(1, 7), max_size=6),
)
def test_everything_moves_whatever_a_call_is_willing_to_do(fd, monkeypatch, pieces, call_limit, piece_limit, short):
    left = list(short)
    asked = []

    class Short:
        """Moves fewer bytes than requested, as system calls may."""

        @staticmethod
        def limit(buffers):
            asked.append((len(buffers), sum(map(len, buffers))))
            room = left.pop() if left else 1 << 30
            some = []
            for buffer in buffers:
                some.append(memoryview(buffer)[:room])
                room -= len(some[-1])
            return some

        @staticmethod
        def pwritev(fd, buffers, offset):
            return os.pwritev(fd, Short.limit(buffers), offset)

        @staticmethod
        def preadv(fd, buffers, offset):
            return os.preadv(fd, Short.limit(buffers), offset)

    with monkeypatch.context() as patch:
        patch.setattr(vectors, "os", Short)
        patch.setattr(vectors, "CALL_LIMIT_BYTES", call_limit)
        patch.setattr(vectors, "PIECE_LIMIT", piece_limit)
        os.ftruncate(fd, 0)
        total = len(b"".join(pieces))
        assert write_fully(fd, pieces, 3) == total
        assert os.pread(fd, 1000, 3) == b"".join(pieces)
        left[:] = short
        buffers = [bytearray(len(piece)) for piece in pieces]
        assert read_fully(fd, [memoryview(buffer) for buffer in buffers], 3) == total
        assert [bytes(buffer) for buffer in buffers] == pieces
    assert all(count <= piece_limit and size <= call_limit for count, size in asked)


def test_reading_stops_at_the_end_of_the_file(fd):
    os.pwrite(fd, b"abc", 0)
    buffer = bytearray(9)
    assert read_fully(fd, [memoryview(buffer)], 1) == 2
    assert buffer[:2] == b"bc"


def test_a_system_that_writes_nothing_is_an_error(fd, monkeypatch):
    class Nothing:
        @staticmethod
        def pwritev(fd, buffers, offset):
            return 0

    monkeypatch.setattr(vectors, "os", Nothing)
    with pytest.raises(OSError, match="wrote nothing"):
        write_fully(fd, [b"a"], 0)


def test_the_limits_are_the_systems():
    assert vectors.CALL_LIMIT_BYTES == 2**31 - 4096
    assert os.sysconf("SC_IOV_MAX") >= vectors.PIECE_LIMIT
