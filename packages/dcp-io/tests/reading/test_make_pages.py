"""Pages of untouched memory are made at once; what is in a buffer, and beside it, stays."""

from __future__ import annotations

import ctypes
import mmap

import pytest

from dcp_io.reading import crc_checks
from dcp_io.reading.crc_checks import make_pages

PAGE, PAGES = mmap.PAGESIZE, 1024


@pytest.fixture
def memory():
    """Untouched memory."""
    with mmap.mmap(-1, PAGES * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as made:
        yield made


def there(memory):
    """The pages that exist."""
    found = (ctypes.c_ubyte * PAGES)()
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    call = ctypes.CDLL(None).mincore
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    assert call(address, PAGES * PAGE, found) == 0
    return {number for number, one in enumerate(found) if one & 1}


@pytest.fixture
def supported(memory):
    """Skip where the system makes no pages at once."""
    with memoryview(memory) as view, view[: 512 * PAGE] as half:
        make_pages(half)
    if not there(memory):
        pytest.skip("needs Linux 5.14")


@pytest.mark.usefixtures("supported")
def test_the_pages_of_a_buffer_are_made_and_no_others(memory):
    assert there(memory) == {*range(512)}
    with memoryview(memory) as view, view[600 * PAGE + 5 : 1000 * PAGE + 7] as part:
        make_pages(part)
    assert there(memory) == {*range(512), *range(601, 1000)}
    assert bytes(memory) == bytes(PAGES * PAGE)


@pytest.mark.usefixtures("supported")
def test_what_is_in_the_buffer_stays(memory):
    memory[700 * PAGE : 701 * PAGE] = b"x" * PAGE
    with memoryview(memory) as view, view[600 * PAGE :] as part:
        make_pages(part)
    assert there(memory) == {*range(512), *range(600, PAGES)}
    assert bytes(memory) == bytes(700 * PAGE) + b"x" * PAGE + bytes((PAGES - 701) * PAGE)


def test_small_buffers_and_those_that_exist_are_left_alone(memory):
    with memoryview(memory) as view, view[: 8 * PAGE] as small:
        make_pages(small)
    assert there(memory) == set()
    memory[0:1] = b"x"
    with memoryview(memory) as view:
        make_pages(view)
    assert there(memory) == {0}


@pytest.mark.parametrize("make", [lambda: bytearray(4 << 20), lambda: memoryview(bytearray(4 << 20))[3:]])
def test_any_writable_buffer_is_taken(make):
    make_pages(memoryview(make()))


def test_where_the_system_has_no_such_calls_nothing_happens(memory, monkeypatch):
    monkeypatch.setattr(crc_checks, "kernel_call", lambda *_: None)
    with memoryview(memory) as view:
        make_pages(view)
    assert there(memory) == set()
