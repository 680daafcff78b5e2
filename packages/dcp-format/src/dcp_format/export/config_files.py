"""Configuration and tokenizer files beside the weights of a model: which they are, and copies of them.

Source: transformers 4 and 5: `transformers.utils` (CONFIG_NAME, …), and `vocab_files_names` of the tokenizers.
"""

from __future__ import annotations

import os
from pathlib import Path

from dcp_core.errors import CheckpointNotFoundError
from dcp_io import LocalStore, Store

__all__ = ["config_files", "copy_config_files"]

_NAMES = frozenset(
    {
        *("config.json", "generation_config.json"),
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
        *(
            "vocab.json",
            "vocab.txt",
            "merges.txt",
            "spiece.model",
            "sentencepiece.bpe.model",
            "source.spm",
            "target.spm",
        ),
        *("chat_template.jinja", "chat_template.json"),
        *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    }
)


def config_files(folder: str | os.PathLike[str]) -> dict[str, Path]:
    """Return name → path of the configuration and tokenizer files of a model in a folder.

    Raises:
        CheckpointNotFoundError: The folder has no `config.json`.
    """
    place = Path(folder)
    if not (place / "config.json").is_file():
        raise CheckpointNotFoundError(f"there is no config.json in {place}: check config_from")
    return {name: place / name for name in sorted(_NAMES) if (place / name).is_file()}


def copy_config_files(files: dict[str, Path], store: Store) -> None:
    """Copy the files into a folder, each atomically and durably; files with the same contents are not touched."""
    for name, path in files.items():
        if isinstance(store, LocalStore) and os.path.realpath(path) == os.path.realpath(os.path.join(store.path, name)):
            continue
        data = path.read_bytes()
        if not store.exists(name) or store.read(name) != data:
            store.publish(name, data)
