"""Known omissions: what a training forgets to save or restore, and what to add."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from dcp_prove.observing.random_states import CPU_RANDOM, NUMPY_RANDOM, PYTHON_RANDOM


@dataclass(frozen=True, slots=True)
class Omission:
    """Part of the state that is often missing from checkpoints."""

    title: str
    remedy: str


OMISSIONS: Mapping[str, Omission] = MappingProxyType(
    {
        "model": Omission(
            "parameters of a model", "save the model, and load it before the first step: app_state(model)"
        ),
        "optimizer": Omission(
            "state of the optimizer", "save the optimizer with the model: app_state(model, optimizer)"
        ),
        "scheduler": Omission("learning-rate scheduler", "save the scheduler: app_state(…, scheduler=scheduler)"),
        "scaler": Omission("gradient scaler", "save the scaler: app_state(…, scaler=scaler)"),
        "ema": Omission(
            "moving average of the weights (EMA)",
            "save the average: app_state(…, ema=ema), where ema has state_dict and load_state_dict",
        ),
        "batchnorm": Omission(
            "buffers of BatchNorm",
            "save all of model.state_dict() rather than its parameters only; with several ranks, the buffers of each "
            "(PerRank), unless they are synchronised",
        ),
        "buffer": Omission(
            "buffers of a model",
            "save all of model.state_dict(); a buffer with persistent=False is not in it and must be saved by itself",
        ),
        "one-rank-rng": Omission(
            "random state of one rank, restored on every rank",
            "save the state of each rank: app_state(…, random=RandomState()), or PerRank(RandomState())",
        ),
        "torch-rng": Omission("random state of torch", "save it for each rank: app_state(…, random=RandomState())"),
        "numpy-rng": Omission(
            "random state of NumPy",
            "save it for each rank: app_state(…, random=RandomState()), with numpy imported before the load",
        ),
        "python-rng": Omission(
            "random state of Python's random module", "save it for each rank: app_state(…, random=RandomState())"
        ),
        "generator": Omission(
            "state of a random generator", "save its get_state(), in a PerRank if it differs between ranks"
        ),
        "drawn-at-resume": Omission(
            "random numbers drawn while resuming",
            "give the DataLoader a generator of its own, DataLoader(…, generator=torch.Generator()): each new iterator "
            "draws a seed; or restore the random state after the iterator has been made",
        ),
        "epoch": Omission(
            "epoch of the sampler",
            "save the epoch, and call sampler.set_epoch(epoch) before the loader is iterated; or save a "
            "dcp_data.ResumableSampler",
        ),
        "position": Omission(
            "position in the epoch",
            "save how many samples have been read, and go on behind them: a dcp_data.ResumableSampler, or a "
            "StatefulDataLoader in a PerRank",
        ),
        "accumulation": Omission(
            "accumulated gradients",
            "save only after a step of the optimizer; or save the gradients and the number of accumulated batches",
        ),
        "worker-seeds": Omission(
            "seeds of data workers",
            "draw random augmentations from a generator that is seeded by (seed, epoch, sample id) in the data set, "
            "not from the generator of the worker, which begins anew with each iterator",
        ),
        "state": Omission("state of the training that is not in the checkpoint", "save it: app_state(…, name=value)"),
    }
)
"""Key → omission, in the order in which they are reported."""

_BY_KIND = {
    "parameter": "model",
    "optimizer": "optimizer",
    "scheduler": "scheduler",
    "scaler": "scaler",
    "average": "ema",
    "batchnorm": "batchnorm",
    "buffer": "buffer",
    "gradient": "accumulation",
    "generator": "generator",
    "epoch": "epoch",
    "sampler": "position",
    "tensor": "state",
}
_BY_GENERATOR = {CPU_RANDOM: "torch-rng", NUMPY_RANDOM: "numpy-rng", PYTHON_RANDOM: "python-rng"}
_BY_NAME = (
    (re.compile(r"accum|micro", re.IGNORECASE), "accumulation"),
    (re.compile(r"epoch", re.IGNORECASE), "epoch"),
    (re.compile(r"pos|steps?_done|cursor|offset|index|batch|seen|consumed|sample|token", re.IGNORECASE), "position"),
)


def omission_of(kind: str, name: str) -> str:
    """Return the omission that a difference after the restore suggests."""
    if kind == "random":
        return _BY_GENERATOR.get(name, "torch-rng")
    if kind in _BY_KIND:
        return _BY_KIND[kind]
    last = name.rpartition(".")[2]
    return next((key for pattern, key in _BY_NAME if pattern.search(last)), "state")
