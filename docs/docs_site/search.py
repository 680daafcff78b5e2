"""Search of the site: which pages come first, words that lead to a page, and the questions that are checked.

The words are here and not at the head of each page, because pages are read in the repository as well, where such a head
is shown as a table. A page's words count most in Material's search, then titles, then text.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["QUESTIONS", "WORDS", "boost_of"]

BOOSTS = (("reference/", 0.2), ("decisions/", 0.2), ("development/", 0.2), ("packages/", 0.3), ("", 2.0))
"""The beginning of a page's place → what its matches count; the first that fits."""

WORDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "install.md": (
            *("install", "pip", "wheels", "CPU", "macOS", "Windows", "supported versions", "PyTorch version"),
        ),
        "from-torch-save.md": (
            *("torch.save", "data loader", "dataloader", "EMA", "GradScaler", "scheduler", "random seed", "RNG"),
            *("single GPU", "resume training"),
        ),
        "cost.md": ("cost", "overhead", "price", "slow", "speed", "GPU memory", "training time"),
        "quickstart.md": (
            *("latest checkpoint", "resume training", "multi node", "torchrun", "load one tensor", "load a part"),
            *("partial load",),
        ),
        "migrate-from-stock.md": ("migrate", "torch.distributed.checkpoint", "Megatron", "strict"),
        "resume-elsewhere.md": (
            *("different world size", "number of GPUs", "resume training", "reshard", "evaluate", "inference"),
            *("export weights", "multi node", "rename keys", "change learning rate", "EMA with FSDP2"),
            *("load for evaluation",),
        ),
        "resume-the-data.md": (
            *("data loader", "dataloader", "sampler", "DistributedSampler", "resume in the middle of an epoch"),
            *("mid-epoch", "data position", "iterable dataset", "shuffle buffer", "StatefulDataLoader"),
            *("different world size",),
        ),
        "state-dicts.md": ("optimizer state", "random seed", "RNG", "EMA", "torch.compile", "_orig_mod"),
        "async.md": ("async save", "background", "GPU memory", "checkpoint stall", "notebook", "Jupyter"),
        "accelerators.md": ("CUDA", "NCCL", "ROCm", "XPU", "NPU", "accelerator", "pinned memory", "PCIe"),
        "manager.md": (
            *("keep last n", "latest checkpoint", "resume training", "load the best checkpoint", "SIGTERM"),
            *("preemption", "best step", "disk full", "SIGUSR1", "save every n minutes", "last step", "save now"),
            *("save on demand",),
        ),
        "prove-a-resume.md": (
            *("loss jump after resume", "loss spike", "exact resume", "deterministic resume", "reproducible"),
            *("prove", "samples seen twice", "sampler epoch", "GradScaler", "random seed"),
        ),
        "compression.md": ("compression", "zstd", "smaller checkpoint"),
        "formats.md": ("safetensors", "convert checkpoint", "export weights", "torch.save"),
        "storage.md": ("save to S3", "GCS", "Azure", "bucket", "cloud", "MinIO"),
        "cooperative-loads.md": (
            *("slow load", "loading gets slower with more nodes", "slow restart", "scale", "bandwidth"),
            *("broadcast", "read once", "multi node", "many nodes", "replicas", "HSDP", "S3 throttling", "NFS"),
        ),
        "command.md": (
            *("list checkpoints", "list tensors", "latest checkpoint", "convert checkpoint", "corrupted file"),
            *("inspect", "verify nightly", "verify every night", "undo a quarantine"),
        ),
        "memory.md": ("checkpoint in memory", "in-memory checkpoint", "keeper", "RAM"),
        "disk-and-time.md": ("disk space", "how much disk", "checkpoint size", "memory needed", "70B", "405B"),
        "cluster.md": ("Slurm", "sbatch", "srun", "Kubernetes", "requeue", "grace period", "torchrun", "time limit"),
        "see-what-it-does.md": ("progress bar", "estimate size", "events", "visualize"),
        "telemetry.md": ("OpenTelemetry", "Prometheus", "Grafana", "metrics", "alert"),
        "debug-a-hang.md": ("hang", "stuck", "timeout", "deadlock", "multi node"),
        "security.md": ("corrupted file", "checksum", "pickle", "encryption", "CVE", "weights_only"),
        "frameworks/hugging-face.md": (
            *("Hugging Face", "Trainer", "accelerate", "transformers", "DeepSpeed", "push to hub"),
            *("export to the Hub",),
        ),
        "frameworks/lightning.md": ("Lightning", "Fabric"),
        "benchmarks.md": ("benchmark", "overhead"),
        "fine-tuning.md": ("LoRA", "PEFT", "adapter", "frozen", "fine-tune", "finetune"),
        "tiers.md": ("rate limit", "bandwidth limit", "promoter rate", "upload", "NVMe", "local disk"),
        "robustness.md": ("crash test", "kill -9", "power loss", "fault injection"),
        "write-a-plugin.md": ("write a storage", "custom storage", "plug-in", "plugin", "entry point"),
        "concepts.md": ("torchao", "quantized", "float8", "dtype", "cast", "strict", "missing key"),
    }
)
"""Page → what readers type who should find it."""

QUESTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "save to S3": ("storage.md",),
        "different world size": ("resume-elsewhere.md",),
        "install": ("install.md",),
        "data loader": ("from-torch-save.md", "resume-the-data.md"),
        "resume in the middle of an epoch": ("resume-the-data.md",),
        "sampler": ("resume-the-data.md",),
        "iterable dataset": ("resume-the-data.md",),
        "StatefulDataLoader": ("resume-the-data.md", "from-torch-save.md"),
        "progress bar": ("see-what-it-does.md",),
        "overhead": ("cost.md",),
        "EMA": ("from-torch-save.md",),
        "evaluate": ("resume-elsewhere.md",),
        "resume training": ("manager.md", "resume-elsewhere.md", "from-torch-save.md"),
        "hang": ("debug-a-hang.md",),
        "safetensors": ("formats.md",),
        "Hugging Face": ("frameworks/hugging-face.md",),
        "Lightning": ("frameworks/lightning.md",),
        "compression": ("compression.md",),
        "latest checkpoint": ("quickstart.md", "manager.md"),
        "keep last n": ("manager.md",),
        "async save": ("async.md",),
        "export weights": ("formats.md",),
        "corrupted file": ("command.md", "security.md"),
        "list checkpoints": ("command.md",),
        "GPU memory": ("async.md", "cost.md"),
        "random seed": ("from-torch-save.md", "state-dicts.md"),
        "multi node": ("quickstart.md", "resume-elsewhere.md"),
        "convert checkpoint": ("formats.md", "command.md"),
        "cost": ("cost.md",),
        "loading gets slower with more nodes": ("cooperative-loads.md",),
        "slow load": ("cooperative-loads.md", "cost.md"),
        "torch.save": ("from-torch-save.md",),
        "why did the loss jump after resume": ("prove-a-resume.md",),
        "samples seen twice": ("prove-a-resume.md",),
        "exact resume": ("prove-a-resume.md",),
        "rename keys": ("resume-elsewhere.md", "concepts.md"),
        "verify nightly": ("command.md",),
        "latest": ("command.md", "manager.md", "quickstart.md"),
        "list tensors": ("command.md",),
        "Slurm": ("cluster.md",),
        "how much disk": ("disk-and-time.md",),
        "Kubernetes": ("cluster.md",),
        "checkpoint in memory": ("memory.md",),
        "load the best checkpoint": ("manager.md",),
        "undo a quarantine": ("command.md",),
        "MinIO": ("storage.md",),
        "keep the best": ("manager.md",),
        "save EMA": ("from-torch-save.md", "resume-elsewhere.md"),
        "save only LoRA weights": ("fine-tuning.md",),
        "save the last step": ("manager.md",),
        "Slurm preemption": ("cluster.md", "manager.md"),
        "save without stalling training": ("async.md", "cost.md"),
        "find the last good checkpoint": ("command.md", "quickstart.md"),
        "free disk space": ("command.md", "disk-and-time.md"),
        "alert on failed saves": ("telemetry.md",),
        "convert to safetensors": ("formats.md", "command.md"),
        "export to the Hub": ("frameworks/hugging-face.md",),
        "which rank hangs": ("debug-a-hang.md",),
        "write a storage": ("write-a-plugin.md",),
        "list tensors without torch": ("command.md",),
        "compare two checkpoints": ("command.md",),
        "change the learning rate": ("resume-elsewhere.md",),
        "load the model for evaluation": ("resume-elsewhere.md",),
        "strict": ("concepts.md", "migrate-from-stock.md"),
        "limit the rate of the promoter": ("tiers.md",),
        "disk full": ("manager.md",),
        "local disk": ("tiers.md",),
        "grace period": ("cluster.md", "manager.md"),
        "torchao": ("concepts.md", "fine-tuning.md"),
    }
)
"""What a reader types → the pages of which one must be among the first results."""


def boost_of(page: str) -> float:
    """What matches on a page count, by its place on the site."""
    return next(boost for beginning, boost in BOOSTS if page.startswith(beginning))
