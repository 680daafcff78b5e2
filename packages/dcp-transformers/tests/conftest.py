from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = Path(__file__).parents[3] / "docs" / "frameworks" / "hugging-face.md"


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., Any]:
    """Make trainers of a small GPT-2 with dropout, over bytes of text; InterruptedError comes after step `stop`."""
    transformers = pytest.importorskip("transformers")
    from pydoc_data.topics import topics

    text = "".join(topics.values()).encode()
    # Of different lengths, for samplers that look at them.
    items = [torch.tensor(list(text[n * 40 : n * 40 + 8 + n % 5])) for n in range(30)]
    dataset = [{"input_ids": ids, "labels": ids} for ids in items]

    def collate(batch: list[dict[str, Any]]) -> dict[str, Any]:
        width = max(len(item["input_ids"]) for item in batch)
        return {
            name: torch.stack([torch.nn.functional.pad(item[name], (0, width - len(item[name]))) for item in batch])
            for name in batch[0]
        }

    class Stop(transformers.TrainerCallback):  # type: ignore[name-defined,misc]
        def __init__(self, step: int) -> None:
            self.step = step

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == self.step:
                raise InterruptedError

    def make(folder: str, *, stop: int = 0, callbacks: Any = (), **arguments: Any) -> Any:
        torch.manual_seed(5)
        config = transformers.GPT2Config(
            vocab_size=256, n_positions=16, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
        )
        chosen = {
            "per_device_train_batch_size": 3,
            "max_steps": 14,
            "save_steps": 4,
            "logging_steps": 1,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "cosine",
            "remove_unused_columns": False,
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
        } | arguments
        return transformers.Trainer(
            transformers.GPT2LMHeadModel(config),
            transformers.TrainingArguments(str(tmp_path / folder), **chosen),
            train_dataset=dataset,
            eval_dataset=dataset[:6],
            data_collator=collate,
            callbacks=[*callbacks, *([Stop(stop)] if stop else [])],
        )

    return make


@pytest.fixture(scope="session")
def page_blocks() -> list[str]:
    """The Python blocks of the docs' page."""
    return re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def run_ranks(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a script as torchrun does, in the test's folder."""

    def run(
        script: Path, ranks: int, *arguments: str, succeeds: bool = True, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        ran = subprocess.run(
            [sys.executable, *launcher, str(script), *arguments],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (ran.returncode == 0) == succeeds, ran.stdout + ran.stderr
        return ran

    return run
