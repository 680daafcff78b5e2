"""Suggestions for misspelled names, commands and options, and for words of other tools."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from types import MappingProxyType

_COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("list", "dir", "find"), "ls"),
        **dict.fromkeys(("info", "inspect", "keys", "tree", "view", "open"), "show"),
        **dict.fromkeys(("get", "print", "value", "values"), "cat"),
        **dict.fromkeys(("check", "validate", "fsck", "test"), "verify"),
        **dict.fromkeys(("compare", "cmp"), "diff"),
        **dict.fromkeys(("export", "import", "copy", "cp", "to"), "convert"),
        **dict.fromkeys(("remove", "delete", "del"), "rm"),
        **dict.fromkeys(("clean", "cleanup", "gc"), "prune"),
        **dict.fromkeys(("dedup", "deduplicate", "duplicates", "hardlink", "link", "share"), "dedupe"),
        "version": "--version",
    }
)

_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "--world": "ranks n-ranks num-ranks world-size nranks nproc nproc-per-node np gpus n-gpus devices size n",
        "--svg": "output out o image picture plot draw save",
        "--html": "output out o page report",
        "--keep": "keep-last last newest latest count max max-to-keep k n",
        "--keep-part": "keep-parts only-part retain-part keep-only",
        "--part": "parts key keys prefix only component remove",
        "--yes": "y no-confirm assume-yes confirm noconfirm no-prompt non-interactive quiet q f",
        "--dry-run": "dryrun simulate what-if noop preview test n",
        "--force": "overwrite ignore",
        "--overwrite": "force f replace clobber exist-ok y yes",
        "--include": "only select filter keys key names name pattern prefix match",
        "--exclude": "skip ignore drop without except omit",
        "--rename": "map mapping prefix strip-prefix drop-prefix add-prefix remap",
        "--rename-regex": "regex sub replace-regex",
        "--dtype": "precision cast type torch-dtype half bf16 fp16 float16 bfloat16",
        "--shard-size": "max-shard-size shard-bytes max-size split shards",
        "--objects": "non-tensors others skip-objects",
        "--compression": "compress zstd codec",
        "--layout": "data-layout file-layout container",
        "--to": "format to-format output-format type t",
        "--json": "format output output-format machine-readable j o",
        "--flat": "list table no-tree plain names 1 l",
        "--depth": "levels level max-depth d l",
        "--stats": "statistics stat summary values s",
        "--keys-only": "names-only no-values structure keys metadata-only names",
        "--rtol": "tolerance tol relative rel eps epsilon",
        "--atol": "tolerance tol absolute abs eps epsilon",
        "--recursive": "all recurse R",
        "--threads": "jobs j workers num-threads num-workers parallel cores t n",
        "--load": "check import verbose",
        "--deep": "read full sound verify check all-bytes d",
        "--no-verify": "skip-verify fast unverified no-check no-read quick",
        "--since": "newer-than newer after last age changed-since",
        "--skip-verified": "state cache resume state-file known seen",
        "--rate": "limit rate-limit bandwidth bwlimit throttle max-rate speed",
        "--json-lines": "jsonl ndjson json-stream lines stream",
    }
)
"""Option → other words for it, in any command with the option."""
_ALIKE = 0.6
_LEAST_LETTERS = 3


def meant_command(word: str, commands: Collection[str]) -> str | None:
    """Return the command that is most like a word, if any."""
    known = word.lower()
    if known in _COMMANDS:
        return _COMMANDS[known]
    found = difflib.get_close_matches(known, [*commands, *_COMMANDS], 1, _ALIKE)
    return None if not found else _COMMANDS.get(found[0], found[0])


def meant_options(typed: str, options: Sequence[str]) -> list[str]:
    """Return up to three `options` that an unknown option may mean, the likeliest first."""
    word = typed.lstrip("-")
    words = {option: _OPTIONS.get(option, "").split() for option in options}
    exact = [option for option in options if word in words[option]]
    begun = [option for option in options if len(word) > 1 and option.startswith(f"--{word}")]
    if exact or len(word) < _LEAST_LETTERS:
        return (exact or begun)[:3]
    # An option and its other words compete as one, by the word that is most like the typed one.
    names = {option.lstrip("-"): option for option in options}
    others = {other: option for option in options for other in words[option] if len(other) >= _LEAST_LETTERS}
    near = difflib.get_close_matches(word, [*names, *others], 3, _ALIKE)
    return [*dict.fromkeys((*begun, *((others | names)[each] for each in near)))][:3]


_COMPARED_NAMES = 2000
_COMPARED_LETTERS = 300


def near(name: str, candidates: Iterable[str]) -> list[str]:
    """Return up to three candidates of similar spelling and length; fast even among 200,000 names."""
    if len(name) > _COMPARED_LETTERS:
        return []
    alike = (each for each in candidates if abs(len(each) - len(name)) <= max(3, len(name) // 2))
    return difflib.get_close_matches(name, islice(alike, _COMPARED_NAMES), 3)


def hint(path: str, name: str, candidates: Collection[str]) -> str:
    """Return a message's end about the meant name, or an empty text."""
    below = sum(each.startswith(f"{name}.") for each in candidates)
    if below:
        return f"; {below} value{'s are' if below > 1 else ' is'} below it: `dcp show {path} '{name}.*'`"
    found = near(name, candidates)
    return f"; near it: {', '.join(found)}" if found else ""
