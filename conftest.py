"""Fixtures for the tests of all packages."""

from __future__ import annotations

import errno
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from dcp_ranks.testing.ranks import RankPool
    from integration_tests.kits.s3_server import S3Server

# For a call of ranks. It takes seconds, but more on a busy machine; a test has longer, so that stacks are shown.
PATIENCE_SECONDS = 240.0


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--device`: the accelerator of the tests marked `device`, which then are the only ones to run."""
    parser.addoption("--device", choices=["cuda", "pretend"], help="run the tests marked `device` on this accelerator")


def pytest_configure(config: pytest.Config) -> None:
    """Install the pretend device if the tests are to run on it, which changes PyTorch for the whole process.

    Scripts that tests start find `integration_tests.kits`, wherever they run.

    No example of a property has a deadline: a busy machine can hold up any of them for longer than 0.2 s.

    The examples are few and the same each time, so that what fails has to do with a change;
    `--hypothesis-profile=random` draws new ones, and more.
    """
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(config.rootpath))))
    if config.getoption("--device") == "pretend":
        from integration_tests.devices import pretend  # noqa: PLC0415 - not every package has it installed

        if not pretend.is_possible():
            pytest.exit("this version of PyTorch lets no Python module be a device", returncode=0)
        pretend.install()
    if importlib.util.find_spec("hypothesis") is None:  # not every package has it installed
        return
    from hypothesis import settings  # noqa: PLC0415

    settings.register_profile("same", deadline=None, derandomize=True, max_examples=30)
    settings.register_profile("random", deadline=None)
    settings.load_profile("same")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run; with `--device`, leave out what needs none."""
    wanted = config.getoption("--device")
    if wanted is not None:
        others = [item for item in items if not item.get_closest_marker("device")]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item.get_closest_marker("device")]
    needs = (
        ("device", lambda: wanted is not None or _has_cuda(), "needs an accelerator: --device=pretend"),
        ("traced", _may_trace, "needs Linux on x86-64, and nothing that forbids ptrace"),
    )
    for marker, is_met, reason in needs:
        marked = [item for item in items if item.get_closest_marker(marker)]
        if marked and not is_met():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


def _has_cuda() -> bool:
    import torch  # noqa: PLC0415 - the packages without torch are tested without it

    return torch.cuda.is_available()


def _may_trace() -> bool:
    from dcp_crash import kernel  # noqa: PLC0415 - not every package has it installed

    return kernel.obstacle() is None


@pytest.fixture(autouse=True)
def no_state_is_left() -> Iterator[None]:
    """A test leaves no process group and no other working folder to those that run after it in the same process."""
    folder = os.getcwd()
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("this test has left its default process group: every later test of this process would be in it")
    if os.getcwd() != folder:
        os.chdir(folder)
        pytest.fail("this test has left its working folder: relative paths of every later test would mean others")


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """The accelerator: `cuda`, or with `--device=pretend` the pretend device, of which nothing is left to do."""
    name = request.config.getoption("--device") or "cuda"
    if name == "cuda":
        yield name
        return
    from integration_tests.devices import pretend  # noqa: PLC0415 - not every package has it installed

    with pretend.machine.scheduled(pretend.Schedule()):
        yield name
        pretend.machine.finish()
    found, pretend.machine.violations[:] = [*pretend.machine.violations], []
    pretend.memory.limits.clear()
    assert found == []


@pytest.fixture
def device_backend(device: str) -> str:
    """The backend of process groups whose tensors are on the accelerator."""
    return {"cuda": "nccl"}.get(device, device)


@pytest.fixture
def fill_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that fills the disk: from then on only empty files can be made in folders."""
    from dcp_io.stores import local_store  # noqa: PLC0415 - not every package has it installed

    write = local_store.write_fully

    def refuse(fd: int, buffers: Sequence[Any], offset: int) -> int:
        if any(map(len, buffers)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, buffers, offset)

    def fill() -> None:
        monkeypatch.setattr(local_store, "write_fully", refuse)

    return fill


@pytest.fixture(scope="session")
def ranks(pytestconfig: pytest.Config) -> Iterator[RankPool]:
    """Real ranks, kept between tests: `ranks.run(world_size, function, *args)` gives each rank's result."""
    pool_type = pytest.importorskip("dcp_ranks.testing.ranks", reason="needs dcp-ranks[testing]").RankPool
    setup = None
    if pytestconfig.getoption("--device") == "pretend":
        from integration_tests.devices import pretend  # noqa: PLC0415 - not every package has it installed

        # One device, as PyTorch computes no gradients on a second one.
        setup = functools.partial(pretend.install, devices=1, schedule=pretend.Schedule(reuse=False))
    with pool_type(timeout_seconds=PATIENCE_SECONDS, setup=setup) as pool:
        yield pool


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """An S3 server on loopback, which clients find by the environment."""
    pytest.importorskip("moto", reason="needs moto[s3]")
    from integration_tests.kits.s3_server import S3Server  # noqa: PLC0415 - not every package has it installed

    with S3Server() as server, server.in_environment():
        yield server


@pytest.fixture(scope="session")
def s3_ranks(s3: S3Server) -> Iterator[RankPool]:  # noqa: ARG001 - the ranks start in its environment
    """As `ranks`, started in the environment that leads to the server."""
    pool_type = pytest.importorskip("dcp_ranks.testing.ranks", reason="needs dcp-ranks[testing]").RankPool
    with pool_type(4, timeout_seconds=PATIENCE_SECONDS) as pool:
        yield pool
