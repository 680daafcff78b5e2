"""Waves: every byte passes through the window unchanged, and every failure ends the waits of both sides."""

from __future__ import annotations

import os
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from mmap import PAGESIZE
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcp_async import SaverDeadlineError, StagingMismatchError, WorkerError
from dcp_async.staging import placement
from dcp_async.staging.arenas import ArenaPool
from dcp_async.staging.checks import MutationGuard
from dcp_async.staging.copy_state import Copier, Staged, Stager, staged_tensors
from dcp_async.staging.placement import Budget, place, sources_of
from dcp_async.staging.waves import PACKET_BYTES, WaveFeed, WaveSource, reserve_addresses
from dcp_core.errors import NotEnoughMemoryError
from dcp_core.tensors.tensor_memory import contiguous, tensor_bytes

STEP = 512
BUDGET = 8 * STEP


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Callable[..., tuple[WaveSource, Any]]:
    monkeypatch.setattr(placement, "_WAVE_MIN_BYTES", 1)
    monkeypatch.setattr(placement, "_PIECE_MIN_BYTES", STEP)

    def make(tensor: torch.Tensor, check: Callable[[], None] = lambda: None) -> tuple[WaveSource, torch.Tensor]:
        budget, memory = Budget(BUDGET), torch.zeros(BUDGET, dtype=torch.uint8)
        made = WaveSource([tensor], place(sources_of([tensor]), budget), memory, budget, check)
        request.addfinalizer(made.close)
        return made, memory

    return make


def _ask(end: socket.socket, *messages: Any) -> list[Any]:
    """Send messages, and return the answers to all but those that begin an item."""
    answers = []
    for message in messages:
        end.send(pickle.dumps(message))
        if message[0] != "begin":
            answers.append(pickle.loads(end.recv(PACKET_BYTES)))
    return answers


def _asked(made: WaveSource, *messages: Any) -> list[Any]:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(_ask(made.saver_end, *messages)))
    thread.start()
    try:
        made.serve(lambda: False, 20)
    finally:
        thread.join(100)
    return found


def test_pieces_are_copied_into_the_slots_that_were_asked_for(source: Callable[..., Any]) -> None:
    value = torch.arange(3000)
    made, memory = source(value)
    begin = ("begin", 0, 0, torch.int64, (3000,), (1,))
    assert _asked(made, begin, ("fill", 0, 2), ("fill", 0, 0), ("done",)) == [
        ("filled", 0, 2),
        ("filled", 0, 0),
        ("ok",),
    ]
    step = made.piece_bytes
    assert torch.equal(memory[2 * step : 3 * step].view(torch.int64), value[: step // 8])
    assert torch.equal(memory[:step].view(torch.int64), value[step // 8 : 2 * step // 8])
    assert made.copied_bytes == 2 * step


def test_an_item_that_no_tensor_has_fails_both_sides(source: Callable[..., Any]) -> None:
    made, _ = source(torch.arange(3000))
    found: list[Any] = []

    def ask() -> None:
        made.saver_end.send(pickle.dumps(("begin", 0, 0, torch.float32, (3000,), (1,))))
        found.append(pickle.loads(made.saver_end.recv(PACKET_BYTES)))

    thread = threading.Thread(target=ask)
    thread.start()
    with pytest.raises(StagingMismatchError, match="no tensor of this save"):
        made.serve(lambda: False, 20)
    thread.join(100)
    ((kind, error),) = found
    assert kind == "failed"
    assert isinstance(pickle.loads(error), StagingMismatchError)


class UnpicklableError(Exception):
    """Holds what cannot be sent."""

    def __init__(self) -> None:
        super().__init__("of the device")
        self.lock = threading.Lock()


def test_an_error_that_cannot_be_sent_arrives_by_its_text(source: Callable[..., Any]) -> None:
    def fail() -> None:
        raise UnpicklableError

    made, _ = source(torch.arange(3000), fail)
    with pytest.raises(UnpicklableError):
        _asked(made, ("done",))
    made, _ = source(torch.arange(3000))
    made.abort(UnpicklableError())
    kind, error = pickle.loads(made.saver_end.recv(PACKET_BYTES))
    assert (kind, repr(pickle.loads(error))) == ("failed", "RuntimeError('UnpicklableError: of the device')")


def test_a_save_that_ends_or_is_late_ends_the_wait(source: Callable[..., Any]) -> None:
    made, _ = source(torch.arange(3000))
    made.serve(lambda: True, 20)
    with pytest.raises(SaverDeadlineError, match=r"0\.1 s \(save_timeout_seconds\)"):
        made.serve(lambda: False, 0.1)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_WAVE_MIN_BYTES", 1)
    monkeypatch.setattr(placement, "_PIECE_MIN_BYTES", STEP)


def _never() -> bool:
    return False


class Save:
    """One state dict in waves, and the feed of its save."""

    def __init__(self, state: dict[str, Any], budget: int, guard: MutationGuard | None = None) -> None:
        pool = ArenaPool(shared=False, pinned=False, max_bytes=-(-budget // PAGESIZE) * PAGESIZE)
        stager = Stager(pool, Copier(1), guard, Budget(budget))
        self.staged: Staged = stager.stage(state, in_waves=True)
        structure, waves = self.staged.structure, self.staged.waves
        assert waves is not None
        self.source = waves
        self.memory = self.staged.arena.view()
        addresses = reserve_addresses(structure.wave_bytes)
        self.feed = WaveFeed(
            waves.saver_end, self.memory[:budget], structure.resident_bytes, waves.piece_bytes, addresses, {}
        )
        self.tensors = staged_tensors(structure, self.memory, addresses)

    def bytes_of(self, tensor: torch.Tensor, max_bytes: int = 300) -> bytes:
        if not self.feed.holds(tensor):
            return _bytes(tensor)
        return b"".join(map(bytes, self.feed.take(tensor).pieces(max_bytes)))

    def read(self, tensors: list[torch.Tensor]) -> list[bytes]:
        """Read tensors in another thread, as a writer does, while this one serves."""
        found: list[bytes] = []

        def read() -> None:
            self.feed.expect(sum(map(self.feed.holds, tensors)))
            found.extend(map(self.bytes_of, tensors))

        with in_thread(read):
            self.source.serve(_never, 20)
        return found

    def close(self) -> None:
        self.feed.close()
        self.source.close()


class in_thread:  # noqa: N801 - a function with a result
    """Runs a function in another thread; its error is kept."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.error: BaseException | None = None

        def run() -> None:
            try:
                function()
            except BaseException as error:
                self.error = error

        self.thread = threading.Thread(target=run)

    def __enter__(self) -> in_thread:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.thread.join(100)
        assert not self.thread.is_alive()


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor_bytes(contiguous(tensor.detach())))


@pytest.fixture
def save() -> Iterator[Callable[..., Save]]:
    made: list[Save] = []

    def make(state: dict[str, Any], budget: int = 8192, guard: MutationGuard | None = None) -> Save:
        made.append(Save(state, budget, guard))
        return made[-1]

    yield make
    for each in made:
        each.close()


@st.composite
def views(draw: st.DrawFn) -> list[torch.Tensor]:
    """Large and small tensors, and views of them: slices, columns, transposed, as other dtypes, tied."""
    found = []
    for _ in range(draw(st.integers(1, 6))):
        rows, columns = draw(st.integers(1, 60)), draw(st.integers(1, 60))
        dtype = draw(st.sampled_from([torch.float32, torch.int16, torch.complex64]))
        base = torch.arange(rows * columns).to(dtype).reshape(rows, columns)
        found.append(base)
        if draw(st.booleans()):
            found.append(base[draw(st.integers(0, rows)) :])
        if draw(st.booleans()):
            found.append(base.t())
        if draw(st.booleans()):
            found += [torch.arange(4000.0).reshape(40, 100)[:, 5:80]]
        if draw(st.booleans()):
            found.append(base.clone().t())
    return found


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(views(), st.integers(8, 40))
def test_all_bytes_arrive_for_any_budget(tensors: list[torch.Tensor], steps: int) -> None:
    state = {str(number): tensor for number, tensor in enumerate(tensors)}
    budget = steps * STEP
    if place(sources_of(tensors)).nbytes <= budget:
        return
    save = Save(state, budget)
    try:
        assert save.read(save.tensors) == [_bytes(tensor) for tensor in tensors]
        ties = [(one, two) for one in range(len(tensors)) for two in range(one)]
        for one, two in ties:
            tied = tensors[one].data_ptr() == tensors[two].data_ptr()
            assert (save.tensors[one].data_ptr() == save.tensors[two].data_ptr()) == tied
    finally:
        save.close()


def test_boxes_of_tensors_arrive(save: Callable[..., Save]) -> None:
    whole, columns = torch.randn(100, 50), torch.randn(50, 100).t()
    made = save({"whole": whole, "columns": columns})
    one, two = made.tensors
    boxes = [one[10:90, 3:40], one[:50], two[7:60], two[5:95, 20:30], one[:0]]
    expected = [whole[10:90, 3:40], whole[:50], columns[7:60], columns[5:95, 20:30], whole[:0]]
    assert made.read(boxes) == list(map(_bytes, expected))


def test_the_trainer_goes_on_when_the_rest_is_in_the_window(save: Callable[..., Save]) -> None:
    value = torch.randn(5000)
    made = save({"a": value})
    go_on, found = threading.Event(), bytearray()

    def write() -> None:
        made.feed.expect(1)
        for piece in made.feed.take(made.tensors[0]).pieces(1 << 20):
            if len(found) >= value.nbytes - 4 * STEP:
                assert go_on.wait(100)
            found.extend(piece)

    before = _bytes(value)
    with in_thread(write) as writer:
        made.source.serve(_never, 20)
        assert len(found) < value.nbytes
        value.zero_()
        go_on.set()
    assert writer.error is None
    assert bytes(found) == before


def test_a_sample_before_the_write_and_no_second_pass(save: Callable[..., Save]) -> None:
    value = torch.randn(5000)
    made = save({"a": value})
    passes: list[bytes] = []

    def write() -> None:
        made.feed.expect(1)
        data = made.feed.take(made.tensors[0])
        passes.append(bytes(next(data.pieces(100))))
        passes.append(b"".join(map(bytes, data.pieces(300))))
        next(data.pieces(100))

    with in_thread(write) as writer:
        made.source.serve(_never, 20)
    assert passes == [_bytes(value)[:100], _bytes(value)]
    assert isinstance(writer.error, StagingMismatchError)


def test_writers_share_a_window_that_one_of_them_could_fill(save: Callable[..., Save]) -> None:
    values = [torch.randn(20_000) for _ in range(4)]
    made = save({str(number): value for number, value in enumerate(values)})
    found: dict[int, bytes] = {}
    made.feed.expect(4)

    def write(number: int) -> None:
        found[number] = made.bytes_of(made.tensors[number])

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    made.source.serve(_never, 20)
    for thread in threads:
        thread.join(100)
    assert found == {number: _bytes(value) for number, value in enumerate(values)}


def test_nothing_to_write_on_this_rank(save: Callable[..., Save]) -> None:
    assert save({"a": torch.randn(5000)}).read([]) == []


def test_a_writer_that_fails_stops_the_others_and_the_trainer(save: Callable[..., Save]) -> None:
    made = save({"a": torch.randn(50_000), "b": torch.randn(50_000)})
    made.feed.expect(2)
    failed = threading.Event()

    def fail() -> None:  # with the window full of its bytes
        next(made.feed.take(made.tensors[0]).pieces(100))
        failed.set()

    def write() -> None:
        assert failed.wait(100)
        made.bytes_of(made.tensors[1])

    over = threading.Event()
    with in_thread(fail), in_thread(write) as writer, in_thread(lambda: made.source.serve(over.is_set, 20)):
        assert failed.wait(100)
        made.feed.close()
        writer.thread.join(100)
        over.set()
    assert isinstance(writer.error, WorkerError)


def test_a_tensor_that_changes_meanwhile_fails_the_save(save: Callable[..., Save]) -> None:
    value = torch.randn(50_000)
    made = save({"a": value}, guard=MutationGuard())
    value.add_(1)
    found: list[bytes] = []
    with pytest.raises(StagingMismatchError, match="'a'"), in_thread(lambda: found.append(_written(made))) as writer:
        made.source.serve(_never, 20)
    assert isinstance(writer.error, StagingMismatchError)
    assert not found


def _written(made: Save) -> bytes:
    made.feed.expect(1)
    return made.bytes_of(made.tensors[0])


def test_an_error_or_an_interrupt_of_the_trainer_fails_the_save(
    save: Callable[..., Save], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = save({"a": torch.randn(50_000)})

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(made.source, "_fill", interrupt)
    with pytest.raises(KeyboardInterrupt), in_thread(lambda: _written(made)) as writer:
        made.source.serve(_never, 20)
    assert isinstance(writer.error, KeyboardInterrupt)


def test_storage_that_hangs_is_given_up(save: Callable[..., Save]) -> None:
    made = save({"a": torch.randn(50_000)})
    made.feed.expect(1)
    pieces = made.feed.take(made.tensors[0]).pieces(100)
    with pytest.raises(SaverDeadlineError, match=r"0\.5 s \(save_timeout_seconds\)"):
        made.source.serve(_never, 0.5)
    with pytest.raises(SaverDeadlineError):
        next(pieces)


def test_a_trainer_that_ends_and_a_save_that_ends(save: Callable[..., Save]) -> None:
    made = save({"a": torch.randn(50_000)})
    made.feed.close()
    made.source.serve(_never, 20)  # returns: the future has the error

    other = save({"a": torch.randn(50_000)})
    other.source.close()
    with in_thread(lambda: _written(other)) as writer:
        pass
    assert isinstance(writer.error, StagingMismatchError)
    save({"a": torch.randn(50_000)}).source.serve(lambda: True, 20)


def test_addresses_have_no_memory() -> None:
    found = reserve_addresses(1 << 40)
    read_end, write_end = os.pipe()
    with pytest.raises(OSError, match="Bad address"):
        os.write(write_end, found[12345:12350].numpy())  # reading them in this process would end it
    os.close(read_end)
    os.close(write_end)


def test_what_cannot_be_copied_in_waves_must_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_WAVE_MIN_BYTES", 1000)
    state = {"large": torch.zeros(5000), **{str(number): torch.zeros(200) for number in range(20)}}
    with pytest.raises(NotEnoughMemoryError, match=r"16,[0-9]+ of them of tensors below"):
        Save(state, 16_896)
