"""A byte-level transformer of about ten million parameters, and how it is sharded.

Plain PyTorch: nothing here knows of checkpoints.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

__all__ = ["ByteTransformer", "sharded_model"]

VOCABULARY = 256


class Block(nn.Module):
    """Causal attention and a feed-forward network, each behind a layer norm and a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.feed_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).reshape(rows, length, width))
        hidden: torch.Tensor = self.down(functional.gelu(self.up(self.feed_norm(x))))
        return x + hidden


class ByteTransformer(nn.Module):
    """Predicts the next byte; `(rows, length)` of int64 to `(rows, length, 256)` of float32."""

    def __init__(self, *, width: int = 320, depth: int = 8, heads: int = 5, length: int = 128) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.bytes(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def sharded_model(mesh: DeviceMesh, *, length: int) -> ByteTransformer:
    """The model, the same on every world size, its parameters sharded over `mesh` with FSDP2.

    Args:
        mesh: a one-dimensional mesh over all ranks.
        length: the longest row, in bytes.

    Ranks: every rank; collective.
    """
    torch.manual_seed(0)
    model = ByteTransformer(length=length)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
