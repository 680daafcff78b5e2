"""`dcp dedupe`: files with equal contents become hard links of one file. See decision 33."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import stat
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import click

from dcp_base import DcpError
from dcp_base.progress import report_operation
from dcp_inspect.arguments import PLACE, existing_folder, is_uri
from dcp_inspect.errors import UNREADABLE, first_line
from dcp_inspect.examples import examples
from dcp_inspect.printing.output import count_bytes, json_option, print_json, say
from dcp_inspect.removal import unfinished_save
from dcp_io import STALE_AFTER_SECONDS, LocalStore
from dcp_io.checkpoints.list_checkpoints import running_saves
from dcp_io.saves.cleanup import read_current
from dcp_io.saves.save_files import mark_bytes
from dcp_manifest.folders.folder import DATA_SUFFIX, is_index_name, put_aside_reason

_SUFFIXES = (DATA_SUFFIX, ".safetensors")
_TAG = "dedupe"
_TEMPORARY = re.compile(rf"\..+\.{_TAG}\.[0-9a-f]+\.tmp")
_SMALLEST_BYTES = 4096
_SAMPLE_BYTES = 64 << 10
_PIECE_BYTES = 1 << 20
_IN_PLACE = (
    "other programs wrote some of these files: remove such a directory before you write to it again. A program that "
    "overwrites a file in place changes all of its links, and root may do so though they are read-only"
)
_NEW = "files written less than an hour ago by a program without save markers"


@click.command("dedupe", epilog=examples("dcp dedupe runs", "dcp dedupe runs --yes", "dcp dedupe runs --json"))
@click.argument("path", type=PLACE)
@click.option("--yes", is_flag=True, help="Replace the files; without it, only say which.")
@json_option
def command(path: str, yes: bool, as_json: bool) -> int:
    """Find data files with equal contents in PATH and below; --yes replaces them by hard links of one file.

    Compared are files of checkpoints (.distcp) and .safetensors files of at least 4 KiB, in one file system. Any
    checkpoint may be removed afterwards. Files of quarantined, unfinished or running checkpoints are left alone.

    Files of other programs become read-only: a program that overwrites one in place changes all of its links. The exit
    code is 4 if a file could not be read or replaced.
    """
    if is_uri(path):
        raise click.BadParameter(f"{path}: only directories have hard links", param_hint="'PATH'")
    search = _Search(os.path.normpath(existing_folder(path)))
    done = [*_links(search)]
    if yes:
        search.clean()
        done = [link for link in done if search.replace(*link)]
    freed = _freed(done)
    if as_json:
        files = [{"path": other.path, "to": kept.path, "bytes": other.size} for kept, other in done]
        facts = {"path": path, "replaced": yes, "files": files, "bytes": freed}
        print_json({**facts, "read_bytes": search.read_bytes, "left": search.left, "failed": search.failed})
    else:
        for kept, other in done:
            say(f"{'linked' if yes else 'would link'} {other.path} to {kept.path}  {count_bytes(other.size)}")
        for place, reason in search.left.items():
            say(f"left alone {place}: {reason}")
        for place, reason in search.failed.items():
            say(f"dcp: {place}: {reason}", err=True)
        if any(not kept.begin for kept, _ in done):
            say(_IN_PLACE)
        size = count_bytes(freed)
        what = f"are links now, {size} freed" if yes else f"can be links: --yes frees {size}"
        say(f"{len(done)} of {search.count} files {what}")
    return UNREADABLE if search.failed else 0


@dataclass(frozen=True, slots=True)
class _File:
    path: str
    facts: os.stat_result
    begin: int
    """Size of the mark; 0 for other programs' files, which may be overwritten in place."""

    @property
    def size(self) -> int:
        return self.facts.st_size

    @property
    def inode(self) -> tuple[int, int]:
        return self.facts.st_dev, self.facts.st_ino

    def is_at(self, path: str) -> bool:
        now = os.lstat(path)
        same = (now.st_dev, now.st_ino) == self.inode
        return same and (now.st_size, now.st_mtime_ns) == (self.facts.st_size, self.facts.st_mtime_ns)

    def attributes(self) -> Hashable:
        facts = self.facts
        return facts.st_dev, facts.st_size, facts.st_uid, facts.st_gid, facts.st_mode & 0o7555, self.begin

    def digest(self, start: int, stop: int) -> bytes:
        digest = hashlib.blake2b(digest_size=32)
        piece = memoryview(bytearray(min(_PIECE_BYTES, stop - start)))
        with open(os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb", buffering=0) as file:
            while start < stop:
                count = os.preadv(file.fileno(), [piece[: min(len(piece), stop - start)]], start)
                if not count:
                    raise OSError(errno.EIO, "the file became shorter", self.path)
                digest.update(piece[:count])
                start += count
        return digest.digest()

    def sample(self) -> Hashable:
        """Digest of the first, middle and last bytes: most files differ there."""
        begin, middle = self.begin, self.size // 2
        starts = (begin, max(begin, middle), max(begin, self.size - _SAMPLE_BYTES))
        return tuple(self.digest(start, min(start + _SAMPLE_BYTES, self.size)) for start in starts)

    def contents(self) -> Hashable:
        return self.digest(self.begin, self.size)


@dataclass(slots=True)
class _Search:
    root: str
    indexes: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)
    """Directory → inodes and times of its index files."""
    left: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    count: int = 0
    read_bytes: int = 0

    def fail(self, error: OSError | DcpError, path: str) -> None:
        if not isinstance(error, FileNotFoundError):
            self.failed[path] = first_line(error)

    def files(self) -> Iterator[_File]:
        for folder, _, names in os.walk(self.root, onerror=lambda error: self.fail(error, str(error.filename))):
            data = [name for name in sorted(names) if name.endswith(_SUFFIXES)]
            if not data:
                continue
            try:
                reason = _reason_against(folder, names)
                self.indexes[folder] = _index_facts(folder)
            except (OSError, DcpError) as error:
                self.fail(error, folder)
                continue
            if reason is not None:
                self.left[folder] = reason
                continue
            for name in data:
                yield from self._file(os.path.join(folder, name))

    def _file(self, path: str) -> Iterator[_File]:
        try:
            facts = os.lstat(path)
            if not stat.S_ISREG(facts.st_mode):
                return
            self.count += 1
            if facts.st_size < _SMALLEST_BYTES:
                return
            with open(path, "rb", buffering=0) as file:
                begin = mark_bytes(file.read(64)) if path.endswith(DATA_SUFFIX) else 0
        except OSError as error:
            self.fail(error, path)
            return
        if not begin and time.time() - facts.st_mtime < STALE_AFTER_SECONDS:
            self.left[os.path.dirname(path)] = _NEW
        else:
            yield _File(path, facts, begin)

    def equal(self, files: list[_File], ask: Callable[[_File], Hashable], size: int = 0) -> list[list[_File]]:
        inodes = {file.inode: file for file in files}
        groups: dict[Hashable, list[_File]] = defaultdict(list)
        answers: dict[tuple[int, int], Hashable] = {}
        total = sum(min(size, file.size) for file in inodes.values())
        with (
            report_operation("compare", self.root) as tick,
            ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
        ):
            tick.expect(total)
            asked = {inode: pool.submit(ask, file) for inode, file in inodes.items()}
            for inode, future in asked.items():
                try:
                    answers[inode] = future.result()
                except OSError as error:
                    self.fail(error, inodes[inode].path)
                tick(min(size, inodes[inode].size))
        self.read_bytes += total
        for file in files:
            if file.inode in answers:
                groups[answers[file.inode]].append(file)
        return [group for group in groups.values() if len({file.inode for file in group}) > 1]

    def replace(self, kept: _File, other: _File) -> bool:
        """Replace `other` by a link of `kept`, unless something has changed."""
        folder, name = os.path.split(other.path)
        store = LocalStore(folder)
        try:
            reason = _reason_against(folder, os.listdir(folder))
            if reason is not None or _index_facts(folder) != self.indexes[folder]:
                self.left[folder] = reason or "its checkpoint was replaced meanwhile"
                return False
            if not (kept.is_at(kept.path) and other.is_at(other.path)):
                self.left[other.path] = "it or the file like it was changed meanwhile"
                return False
            if not kept.begin:
                os.chmod(kept.path, stat.S_IMODE(kept.facts.st_mode) & ~0o222)
            source, source_name = os.path.split(kept.path)
            store.link(name, LocalStore(source), source_name, tag=_TAG)
            if _index_facts(folder) != self.indexes[folder] and not _is_named(store, name):
                store.delete(name)  # it was being removed, and the link has brought it back
            store.sync_folder()
        except (OSError, DcpError) as error:
            self.fail(error, other.path)
            return False
        return True

    def clean(self) -> None:
        """Remove temporary links of a killed command, but no last ones."""
        for folder in self.indexes:
            with contextlib.suppress(FileNotFoundError):
                for name in os.listdir(folder):
                    path = os.path.join(folder, name)
                    if _TEMPORARY.fullmatch(name) and os.lstat(path).st_nlink > 1:
                        os.unlink(path)


def _links(search: _Search) -> Iterator[tuple[_File, _File]]:
    groups = search.equal([*search.files()], _File.attributes)
    groups = search.equal([file for group in groups for file in group], lambda file: (file.attributes(), file.sample()))
    whole = [file for group in groups for file in group]
    for group in search.equal(whole, lambda file: (file.attributes(), file.contents()), 1 << 62):
        kept = min(group, key=lambda file: (-file.facts.st_nlink, file.path))
        yield from ((kept, other) for other in group if other.inode != kept.inode)


def _freed(links: list[tuple[_File, _File]]) -> int:
    names = Counter(other.inode for _, other in links)
    files = {other.inode: other for _, other in links}
    return sum(files[inode].size for inode, count in names.items() if count >= files[inode].facts.st_nlink)


def _reason_against(folder: str, names: list[str]) -> str | None:
    if (reason := put_aside_reason(names)) is not None:
        return reason
    store = LocalStore(folder)
    if saves := running_saves(store, stale_after_seconds=STALE_AFTER_SECONDS):
        return f"a save is writing to it ({saves[0]})"
    if not any(map(is_index_name, names)) and any(name.endswith(DATA_SUFFIX) for name in names):
        return unfinished_save(store).reason or "it has data files, but no index"
    return None


def _index_facts(folder: str) -> dict[str, tuple[int, int]]:
    with os.scandir(folder) as entries:
        found = [entry for entry in entries if is_index_name(entry.name)]
        return {entry.name: (entry.inode(), entry.stat(follow_symlinks=False).st_mtime_ns) for entry in found}


def _is_named(store: LocalStore, name: str) -> bool:
    current = read_current(store)
    return current.damage is not None or (current.index is not None and name in current.index.files)
