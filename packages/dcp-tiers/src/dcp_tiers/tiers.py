"""`Tiers`: a root over several storages, which names checkpoints for saves and loads."""

from __future__ import annotations

import logging
import operator
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from dcp_base import CheckpointEvent, DcpError, installed
from dcp_base.logs import library_logger
from dcp_io import STALE_AFTER_SECONDS, HostStore, KeepAll, KeepPolicy, LocalStore, Store, open_store
from dcp_io.roots.catalogue import Catalogue
from dcp_io.roots.copy_notes import HostCopies, JobHosts
from dcp_io.stores.open_store import file_at
from dcp_manifest import CheckpointNotFoundError
from dcp_tiers.listing import TieredStep, list_steps
from dcp_tiers.promoter_process import PromoterProcess
from dcp_tiers.removal import make_room
from dcp_tiers.tier import (
    DESCRIPTION,
    Description,
    Tier,
    TiersError,
    decode_tiers,
    doubt_of,
    encode_tiers,
    is_number,
    is_same_place,
)
from dcp_tiers.waiting import KeepWaiting, TieredRoot, steps_to_send

_log = library_logger(__name__)

_PROGRESS_TIMEOUT_SECONDS = 24 * 3600.0


class Tiers:
    """Root of a training run with its checkpoints on several storages, the nearest first.

    Saves go to the first tier; a promoter copies the checkpoints that the other tiers' policies select. Each tier has a
    self-contained directory per checkpoint, which any tool can read.

    Args:
        tiers: The tiers, at least one, nearest first.
        folder_prefix: Prefix of checkpoint directory names, before the step.
        stale_after_seconds: Age at which a marker or lease of a process on another host counts as dead.
        progress_timeout_seconds: Seconds without progress after which the promoter exits, once the trainer has ended.
            The default outlasts a storage outage of one night. The promoter never exits while the trainer runs.

    Raises:
        TiersError: There is no tier, one is given twice, a further tier is per host, `per_host` or `copies` is set for
            a shared store, or a time is not above 0.
        ValueError: Tools cannot read the step from directory names with this prefix.

    Example:
        ```python
        import dcp_all as dcp
        from dcp_io import KeepLast
        from dcp_tiers import Tier, Tiers

        tiers = Tiers([Tier("near", keep=KeepLast(2)), Tier("far")])
        dcp.save({"step": 40}, checkpoint_id=tiers.step(40))
        state = {"step": 0}
        dcp.load(state, checkpoint_id=tiers.find(tiers.latest()))
        assert state["step"] == 40
        ```
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        folder_prefix: str = "step-",
        stale_after_seconds: float = STALE_AFTER_SECONDS,
        progress_timeout_seconds: float = _PROGRESS_TIMEOUT_SECONDS,
    ) -> None:
        tiers = _list_of(tiers)
        for name, seconds in (
            ("stale_after_seconds", stale_after_seconds),
            ("progress_timeout_seconds", progress_timeout_seconds),
        ):
            if not (is_number(seconds) and seconds > 0):  # NaN, too
                raise TiersError(f"{name} is {seconds!r}; it must be a number of more than 0")
        urls = [tier.url for tier in tiers]
        self._stores = tuple(map(open_store, urls))
        self.tiers = tuple(map(_checked, tiers, self._stores))
        self.folder_prefix = folder_prefix
        self.stale_after_seconds = stale_after_seconds
        if not urls:
            raise TiersError("there are no tiers; give at least one, such as Tier('/nvme/run')")
        for tier in self.tiers[1:]:
            if tier.per_host:
                raise TiersError(f"{tier.root}: only the first tier may be one of each host (per_host)")
        # The directory of each host may be that of another tier.
        places = [
            os.path.realpath(store.path) if isinstance(store, LocalStore) else store.url for store in self._stores
        ]
        if twice := {place for place in places if places.count(place) > 1}:
            raise TiersError(f"{min(twice)} is in the list of tiers twice; each tier needs a directory of its own")
        self.catalogues = tuple(
            Catalogue(store, stale_after_seconds=stale_after_seconds, folder_prefix=folder_prefix)
            for store in self._stores
        )
        """One per tier, nearest first."""
        self.largest_bytes = 0
        """Largest checkpoint in the last listing of the first tier."""
        self._described = Description(self.tiers, folder_prefix, stale_after_seconds)
        self.doubt: str | None = None
        """Why the tiers' paths need confirmation."""
        self._promoter = PromoterProcess(urls[0], progress_timeout_seconds)

    @classmethod
    def read(cls, place: str | os.PathLike[str], *, own: bool = False, trust: bool = False) -> Tiers:
        """Return the tiers that a file describes; one of them must be the file's directory.

        Managers and promoters write and remove checkpoints at these paths. They raise TiersError if another user owns
        the file, any user can write to it, or it is in a bucket, where files have no owner.

        Args:
            place: Path or URI of a file `run.tiers.toml`, or of a tier's directory.
            own: Whether to raise that error now.
            trust: Whether to accept such a file, after you have read it.

        Raises:
            CheckpointNotFoundError: The file does not exist.
            TiersError: The file does not describe tiers, or is for other directories; or see `own`.
        """
        text = os.fspath(place)
        is_file = text.endswith(".toml") and not os.path.isdir(text)
        known = file_at(text) if is_file else (open_store(text), DESCRIPTION)
        if known is None:
            raise CheckpointNotFoundError(
                f"there is no file {text}; Tiers.write() and the promoter write {DESCRIPTION}"
            )
        store, name = known
        try:
            data = store.read(name)
        except CheckpointNotFoundError as error:
            raise CheckpointNotFoundError(
                f"{store.url} has no {DESCRIPTION}: it is not a tier, or Tiers.write() was never called"
            ) from error
        file = f"{store.url}/{name}"
        found = cls.decode(data, file)
        if not any(is_same_place(store, tier) for tier in found.places):
            listed = ", ".join(tier.url for tier in found.tiers)
            raise TiersError(
                f"{file} is a description for {listed}, not for {store.url}: was the directory moved, copied, or "
                "mounted under another path? Give the path that it names, or correct the root in the file"
            )
        found.doubt = None if trust else doubt_of(store, name, data)
        if own:
            found.check_trusted()
        return found

    @classmethod
    def decode(cls, data: bytes, file: str) -> Tiers:
        """Return the tiers in bytes of `file`. Raises TiersError."""
        found = decode_tiers(data, file)
        try:
            return cls(found.tiers, folder_prefix=found.folder_prefix, stale_after_seconds=found.stale_after_seconds)
        except ValueError as error:
            raise TiersError(f"{file}: {error}") from error

    def check_trusted(self) -> None:
        """Raise TiersError for tiers from an unconfirmed file: see `read`."""
        if self.doubt is not None:
            listed = ", ".join(tier.url for tier in self.tiers)
            raise TiersError(
                f"{self.doubt}, and checkpoints would be written and removed where it says, in {listed}: read it and, "
                "if it is right, confirm it with --trust-description, or Tiers.read(..., trust=True)"
            )

    def write(self) -> None:
        """Write `run.tiers.toml` into the first tier for other processes; a promoter writes it to the others.

        Raises ValueError for a policy of a user-defined class, OSError if the storage fails.

        Ranks: one.
        """
        self.write_to(0)

    def write_to(self, number: int) -> None:
        """Write the description into a tier that lacks it. Raises as `write`."""
        self.check_trusted()
        store, data = self._stores[number], encode_tiers(self._described)
        if store.exists(DESCRIPTION) and store.read(DESCRIPTION) == data:
            return
        store.make()
        store.publish(DESCRIPTION, data)

    def host_id(self) -> str:
        """Return the id of this host's directory in the first tier, 16 hexadecimal digits; create it if missing."""
        return JobHosts(self._stores[0]).own_id()

    @property
    def copies(self) -> HostCopies | None:
        """Way to copy each host's part to other hosts."""
        return self.tiers[0].copies

    @property
    def places(self) -> tuple[Store, ...]:
        """Stores of the tiers, nearest first."""
        return self._stores

    def step(self, step: int) -> str:
        """Return the checkpoint id for saving a step: its directory in the first tier.

        Raises TiersError unless the step is an integer of at least 0.
        """
        try:
            number = -1 if isinstance(step, bool) else operator.index(step)
        except TypeError:
            number = -1
        if number < 0:
            raise TiersError(f"step is {step!r}; it must be a whole number of at least 0")
        return self._id(0, number)

    def _id(self, number: int, step: int) -> str:
        return f"{self.tiers[number].url}/{self.catalogues[number].folder_name(step)}"

    def find(self, step: int | None) -> str:
        """Return the checkpoint id for loading a step: its directory in the nearest tier with a complete copy.

        With a per-host tier, the id stands for all hosts' directories and the other tiers, which supply missing files;
        the load checks for completeness.

        Raises:
            CheckpointNotFoundError: The step is None, as from `latest` without checkpoints, or no tier has a complete
                copy; the message says what each tier lacks.
        """
        near = self._stores[0]
        if step is not None and isinstance(near, HostStore):
            store = near.child(self.catalogues[0].folder_name(step))
            return store.uri([self._id(number, step) for number in range(1, len(self.tiers))])
        problems = []
        for number, catalogue in enumerate(self.catalogues):
            try:
                if step is None:
                    raise CheckpointNotFoundError("there is no complete checkpoint")
                if catalogue.is_good(step):
                    catalogue.check(step)
                    return self._id(number, step)
                problems.append(f"{self.tiers[number].url} does not have it")
            except (OSError, DcpError) as error:
                problems.append(f"{self.tiers[number].url}: {error}")
        raise CheckpointNotFoundError(f"step {step} is complete in no tier: {'; '.join(problems)}")

    def latest(self) -> int | None:
        """Return the highest step that is complete in some tier; None if there is none.

        A copy is complete if its index and all files have full length. In a per-host tier, this host's index is enough.
        Higher incomplete steps are skipped with a warning, and so are tiers that are unreadable or silent for half a
        minute, if others have checkpoints; otherwise OSError is raised.

        Ranks: one; not collective.
        """
        copies = Catalogue.newest_first(self.catalogues)
        good = ((record.step, number) for record, number in copies if record.quarantined is None)
        newest = next((step for step, number in good if self._is_complete(number, step)), None)
        for one in Catalogue.unfinished_above(self.catalogues, newest):
            level = logging.INFO if one.is_running else logging.WARNING
            _log.log(level, "step %d is not complete: %s", one.step, one.text)
        return newest

    def _is_complete(self, number: int, step: int) -> bool:
        if self.tiers[number].per_host:
            return True
        try:
            self.catalogues[number].check(step)
        except (OSError, DcpError) as error:
            _log.warning("step %d in %s is passed over: %s", step, self.tiers[number].url, error)
            return False
        return True

    def steps(self) -> list[TieredStep]:
        """Return all steps in ascending order with the states of their copies, from all indexes. Raises OSError.

        Ranks: one; not collective.
        """
        return list_steps(self.catalogues)

    @property
    def keep_waiting(self) -> KeepPolicy:
        """Policy that keeps only what further tiers still need."""
        return KeepWaiting(self)

    @property
    def keep_policy(self) -> KeepPolicy:
        """A manager's policy for the first tier: the tier's policy and `keep_waiting`. Raises as `check_trusted`."""
        self.check_trusted()
        return self.tiers[0].keep | self.keep_waiting

    def kept_by(self, policy: KeepPolicy) -> KeepPolicy:
        """Combine a manager's policy for the first tier with `keep_waiting`; promoters then remove nothing there.

        Raises as `check_trusted`.
        """
        self.check_trusted()
        described = (replace(self.tiers[0], keep=KeepAll()), *self.tiers[1:])
        self._described = Description(described, self.folder_prefix, self.stale_after_seconds)
        return policy | self.keep_waiting

    def make_room(self, step: int, *, hurry: bool) -> bool:
        """Bring the first tier within its budget before a save of `step`; return False if the save should wait.

        The step is assumed as large as the largest checkpoint there. With `hurry`, the save cannot wait: a full tier
        drops checkpoints that further tiers still need. Storage failures are logged, and the save continues.

        Raises as `check_trusted`.

        Ranks: one.
        """
        self.check_trusted()
        try:
            return make_room(self, 0, step, drop=hurry)
        except (OSError, DcpError) as error:
            _log.warning("%s is not brought within its budget: %s", self.tiers[0].url, error)
            return True

    def start_promoter(self) -> None:
        """Write the description and start the promoter process, unless it runs; log failures.

        The process also promotes pending checkpoints of earlier runs. After this process ends, it exits once all have
        arrived. `CheckpointManager` calls this. Raises as `check_trusted`.

        Ranks: one.
        """
        if len(self.tiers) == 1:
            return
        self.check_trusted()
        try:
            self.write()
            self._promoter.start(encode_tiers(self._described))
        except (OSError, ValueError) as error:
            _log.warning("no promoter of %s was started: %s", self.tiers[0].url, error)

    def wake_promoter(self) -> None:
        """Make the promoter look for new checkpoints; start it if it has ended. Ranks: one."""
        if not self._promoter.wake():
            self.start_promoter()
            self._promoter.wake()

    def end_promoter(self, timeout_seconds: float | None = None) -> None:
        """Wait for the promoter, at most `timeout_seconds`; an event and a warning say what further tiers lack.

        Another trainer's promoter is waited for only if this process has saved.

        Ranks: one.
        """
        try:
            if lacking_steps(self):
                self.start_promoter()
            _report_lacking(self, _wait_for_promoter(self, self._promoter, timeout_seconds))
        except (OSError, DcpError) as error:
            self._promoter.leave()
            _log.warning("what further tiers lack of %s is not known: %s", self.tiers[0].url, error)

    def drain(self, timeout_seconds: float | None = None) -> dict[str, list[int]]:
        """Wait until further tiers have all that their policies select; return the steps that they still lack.

        A promoter process is started if none runs; it continues after the time.

        Args:
            timeout_seconds: Maximum time to wait; None waits until all have arrived or cannot be promoted.

        Returns:
            Path or URI of a tier → steps that it lacks, ascending.

        Raises:
            OSError: The first tier cannot be read.

        Ranks: one.

        Example:
            ```python
            import dcp_all as dcp
            from dcp_tiers import Tier, Tiers

            tiers = Tiers([Tier("near"), Tier("far")])
            dcp.save({"step": 40}, checkpoint_id=tiers.step(40))
            assert tiers.drain(timeout_seconds=120) == {}
            ```
        """
        # Start it even if no step is lacking: a further tier may have lost some.
        if len(self.tiers) > 1 and self.catalogues[0].folders():
            self.wake_promoter()
        return _wait_for_promoter(self, self._promoter, timeout_seconds)


def _list_of(tiers: Sequence[Tier]) -> list[Tier]:
    found = [*tiers] if isinstance(tiers, Iterable) else [tiers]
    if not (isinstance(tiers, Iterable) and all(isinstance(tier, Tier) for tier in found)):
        raise TiersError(f"tiers are {tiers!r}; give a list such as [Tier('/nvme/run'), Tier('/slow/run')]")
    return found


def _checked(tier: Tier, store: Store) -> Tier:
    if isinstance(store, HostStore):
        return tier if tier.per_host else replace(tier, per_host=True)
    if tier.copies is not None and not tier.per_host:
        raise TiersError(f"tier {tier.root}: only a tier of each host (per_host) has copies on other hosts (copies)")
    if tier.per_host:
        raise TiersError(
            f"tier {tier.root}: all hosts share the store of this URI, so it cannot be one of each host (per_host); "
            "give the path of a directory, or the URI of a store that each host has for itself"
        )
    return tier


_POLL_SECONDS, _LAST_TIMEOUT_SECONDS = 0.5, 10.0


def lacking_steps(tiers: TieredRoot) -> dict[str, list[int]]:
    """Return further tier → steps that it needs from the first. Raises OSError."""
    further = range(1, len(tiers.tiers))
    folders = tiers.catalogues[0].folders() if further else ()
    left = {tiers.tiers[number].url: sorted(steps_to_send(tiers, number, 0, folders)) for number in further}
    return {url: steps for url, steps in left.items() if steps}


def _wait_for_promoter(
    tiers: TieredRoot, promoter: PromoterProcess, timeout_seconds: float | None
) -> dict[str, list[int]]:
    """Return what tiers lack, after the promoter's end, or when it hangs with nothing left to copy."""
    end = float("inf") if timeout_seconds is None else time.monotonic() + timeout_seconds
    try:
        _wait(tiers, promoter, end)
    finally:
        promoter.leave()
    return lacking_steps(tiers)


def _wait(tiers: TieredRoot, promoter: PromoterProcess, end: float) -> None:
    while not promoter.end(max(0.0, min(_POLL_SECONDS, end - time.monotonic()))):
        if time.monotonic() >= end:
            break
        if not lacking_steps(tiers):
            ended = promoter.end(max(0.0, min(_LAST_TIMEOUT_SECONDS, end - time.monotonic())))
            if ended or not lacking_steps(tiers):  # it may have found that a tier has lost something
                break


def _report_lacking(tiers: TieredRoot, left: Mapping[str, Sequence[int]]) -> None:
    nearest, *further = (tier.url for tier in tiers.tiers)
    alone = set.intersection(*({*left.get(url, ())} for url in further)) if further else set()
    for url, steps in left.items():
        text = f"{url} lacks steps {_listed(steps)}"
        if alone:
            text += f"; {nearest} alone has {_listed(sorted(alone))}"
        _log.warning("%s", text)
        event = CheckpointEvent("promote", "left", "failed", 0, url, error=text, time=time.time())
        installed.emit(event)


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps))
